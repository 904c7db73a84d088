"use strict";
// A matrix on the page: a table whose cells are reached by mouse, finger and arrow keys, and which shades, hatches and links.

(() => {
  const Lesson = globalThis.Lesson;
  const { el } = Lesson;

  /**
   * A matrix. `name` is what links refer to; `kind` gives the hue: "q", "k", "v", "w" or "s".
   * `onpick(name, i, j)` is called when a cell is pointed at or focused, `onpress(name, i, j)` when it is tapped.
   */
  Lesson.Matrix = class {
    constructor({ name, kind, title, id = null, labelRows = false, labelColumns = false, digits = 2, onpick, onpress }) {
      Object.assign(this, { name, kind, title, labelRows, labelColumns, digits, onpick, onpress });
      this.at = [0, 0];
      this.body = el("tbody");
      this.head = el("thead");
      this.caption = el("span", {}, title);
      this.node = el("table", { class: `matrix ${kind}`, id, "data-matrix": name }, el("caption", {}, this.caption), this.head, this.body);
      this.node.addEventListener("pointerover", (event) => this.pointed(event.target));
      this.node.addEventListener("focusin", (event) => this.pointed(event.target));
      this.node.addEventListener("click", (event) => {
        const cell = event.target.closest("td");
        if (cell && this.onpress) this.onpress(this.name, Number(cell.dataset.i), Number(cell.dataset.j));
      });
      this.node.addEventListener("keydown", (event) => this.key(event));
    }

    pointed(target) {
      const cell = target.closest && target.closest("td");
      if (cell && this.onpick) this.onpick(this.name, Number(cell.dataset.i), Number(cell.dataset.j));
    }

    key(event) {
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      const cell = event.target.closest("td");
      if (!cell) return;
      const [i, j] = [Number(cell.dataset.i), Number(cell.dataset.j)];
      if (event.key in moves) {
        const next = this.cell(i + moves[event.key][0], j + moves[event.key][1]);
        event.preventDefault();
        if (next) {
          cell.tabIndex = -1;
          next.tabIndex = 0;
          next.focus();
        }
      } else if ((event.key === "Enter" || event.key === " ") && this.onpress) {
        event.preventDefault();
        this.onpress(this.name, i, j);
      }
    }

    cell(i, j) { return this.body.querySelector(`td[data-i="${i}"][data-j="${j}"]`); }

    /**
     * Show numbers. `rows` and `columns` are the indices that are shown; `labels` their names; `text(x, i, j)` a cell's text;
     * `state(i, j)` its classes; `shade(x, i, j)` how strong its hue is, 0 to 1.
     */
    show({ values, rows, columns, rowLabels = [], columnLabels = [], text, state = () => "", shade = null, note = null }) {
      const same = this.shape === `${rows}|${columns}`;
      if (!same) this.build(rows, columns);
      this.shape = `${rows}|${columns}`;
      if (this.labelColumns) {
        [...this.head.querySelectorAll("th[scope]")].forEach((th, n) => this.label(th, columnLabels[columns[n]]));
      }
      if (this.labelRows) {
        [...this.body.querySelectorAll("th")].forEach((th, n) => this.label(th, rowLabels[rows[n]]));
      }
      for (const cell of this.body.querySelectorAll("td")) {
        const [i, j] = [Number(cell.dataset.i), Number(cell.dataset.j)];
        const x = values[i][j];
        const shown = text ? text(x, i, j) : Lesson.number(x, this.digits);
        if (cell.firstChild.textContent !== shown) cell.firstChild.textContent = shown;
        const classes = state(i, j);
        if (cell.className !== classes) cell.className = classes;
        if (shade) cell.style.setProperty("--w", shade(x, i, j).toFixed(3));
        cell.setAttribute("aria-label", note ? note(x, i, j) : shown);
      }
    }

    label(th, text) {
      const shown = Lesson.shortened(text ?? "");
      if (th.firstChild.textContent !== shown) th.firstChild.textContent = shown;
      th.title = Lesson.spelled(text ?? "");
    }

    build(rows, columns) {
      Lesson.replace(this.head, this.labelColumns
        ? el("tr", {}, this.labelRows ? el("td", { class: "corner" }) : null, columns.map(() => el("th", { scope: "col" }, el("bdi"))))
        : []);
      Lesson.replace(this.body, rows.map((i) => el("tr", {},
        this.labelRows ? el("th", { scope: "row" }, el("bdi")) : null,
        columns.map((j) => el("td", { "data-i": i, "data-j": j, tabindex: -1 }, el("span"))))));
      const first = this.body.querySelector("td");
      if (first) first.tabIndex = 0;
    }

    mark(kind, test) {
      for (const cell of this.body.querySelectorAll("td")) {
        cell.classList.toggle(kind, !!test && test(Number(cell.dataset.i), Number(cell.dataset.j)));
      }
    }
  };

  /** Copies of the cells `from` fly into the cell `to`: shows where a number comes from. */
  Lesson.fly = (from, to) => {
    if (!Lesson.moves() || !to) return;
    const goal = to.getBoundingClientRect();
    from.slice(0, 24).forEach((cell, n) => {
      const start = cell.getBoundingClientRect();
      const copy = el("span", { class: `flying ${cell.closest("table").className}`, "aria-hidden": "true" }, cell.textContent);
      Object.assign(copy.style, {
        left: `${start.left + scrollX}px`, top: `${start.top + scrollY}px`, width: `${start.width}px`, height: `${start.height}px`,
      });
      document.body.append(copy);
      const shift = `translate(${goal.left - start.left}px, ${goal.top - start.top}px)`;
      copy.animate(
        [{ transform: "none", opacity: 1 }, { transform: shift, opacity: 0.9, offset: 0.8 }, { transform: `${shift} scale(.6)`, opacity: 0 }],
        { duration: 650, delay: n * 45, easing: "cubic-bezier(.4,0,.2,1)", fill: "backwards" },
      ).finished.then(() => copy.remove(), () => copy.remove());
    });
  };
})();
