"use strict";
// The workbench: a sentence, a mask, and every step of attention; all recomputed at each change.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;

  // The masks of the buttons, for a sentence of n tokens.
  const PRESETS = {
    causal: () => "causal",
    full: () => "full",
    window: () => "causal & window(2)",
    sinks: () => "causal & (window(2) | first(1))",
    prefix: () => "causal | first(2)",
    documents: (n) => `causal & documents(lengths=[${n < 2 ? Math.max(1, n) : `${Math.ceil(n / 2)}, ${Math.floor(n / 2)}`}])`,
  };
  const WINDOW = /\bwindow\((\d+)\)/;
  const FIRST_PICKED = ["scaled", 2, 1];

  class Workbench {
    constructor(root) {
      this.root = root;
      this.find = (selector) => root.querySelector(selector);
      this.sentence = document.getElementById("sentence");
      this.maskText = document.getElementById("mask-text");
      this.maskSwitch = document.getElementById("mask-switch");
      this.width = document.getElementById("window-width");
      this.picked = FIRST_PICKED;
      this.lastGood = "causal"; // the mask in force while a text cannot be read
      this.drawn = null; // a table drawn by hand
      this.edited = false; // whether q or k was changed by hand
      this.origin = 0; // first token shown, where there are more than fit
      this.makeMatrices();
      this.listen();
      this.read();
    }

    makeMatrices() {
      const make = (name, kind, title, more = {}) => {
        const matrix = new Lesson.Matrix({
          name, kind, title, onpick: (...at) => this.pick(...at), onpress: (...at) => this.press(...at), ...more,
        });
        this.find(`[data-place="${name}"]`).append(matrix.node);
        return matrix;
      };
      const rows = { labelRows: true };
      this.matrices = {
        x: make("x", "x", t("m.x"), rows),
        W_q: make("W_q", "q", t("m.W_q")), W_k: make("W_k", "k", t("m.W_k")), W_v: make("W_v", "v", t("m.W_v")),
        q: make("q", "q", t("m.q"), rows),
        k: make("k", "k", t("m.k"), { labelColumns: true }),
        v: make("v", "v", t("m.v"), rows),
        scaled: make("scaled", "s", t("m.scaled")),
        mask: make("mask", "m", t("m.mask"), { labelColumns: true }),
        masked: make("masked", "s", t("m.masked"), {}),
        weights: make("weights", "w", t("m.weights"), { id: "weights", labelRows: true, labelColumns: true }),
        output: make("output", "v", t("m.output")),
      };
      this.maps = {};
      for (const name of ["q", "k", "v"]) {
        const matrix = new Lesson.Matrix({ name, kind: name, title: t(`m.${name}`).replace("ᵀ", ""), onpick: (_, i, j) => this.pick(name, ...(name === "k" ? [j, i] : [i, j])) });
        this.find(`[data-place="${name}-made"]`).append(matrix.node);
        this.maps[name] = matrix;
      }
    }

    listen() {
      this.sentence.addEventListener("input", () => this.setSentence(this.sentence.value));
      this.maskText.addEventListener("input", () => { this.drawn = null; this.read(); });
      this.maskSwitch.addEventListener("change", () => this.compute());
      this.width.addEventListener("input", () => {
        this.setMask(this.maskText.value.replace(WINDOW, `window(${this.width.value})`));
      });
      this.presets = [...this.root.querySelectorAll("[data-preset]")];
      for (const button of this.presets) {
        button.addEventListener("click", () => this.setMask(PRESETS[button.dataset.preset](this.n)));
      }
      this.find("[data-action=reset]").addEventListener("click", () => this.reset());
      this.find("[data-action=replace]").addEventListener("click", () => this.replaceLast());
      this.root.addEventListener("pointerleave", () => this.highlight());
      this.overview = this.find("canvas");
      this.overview.addEventListener("click", (event) => {
        const box = this.overview.getBoundingClientRect();
        this.moveTo(Math.floor(((event.clientY - box.top) / box.height) * this.n - this.shown / 2));
      });
      this.find("#view-from").addEventListener("input", (event) => this.moveTo(Number(event.target.value) - 1));
      this.nudge = this.find("#nudge");
      this.nudge.addEventListener("input", () => this.change(Number(this.nudge.value)));
      let width = this.root.clientWidth;
      new ResizeObserver(() => {
        if (this.root.clientWidth !== width) { width = this.root.clientWidth; this.compute(); }
      }).observe(this.root);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.paint());
    }

    reset() {
      if (Lesson.walk) Lesson.walk.go(-1);
      this.sentence.value = Lesson.data.sentences.start;
      this.edited = false;
      this.picked = FIRST_PICKED;
      this.origin = 0;
      this.setMask("causal");
    }

    /** Another sentence. Documents from their button are laid out anew, because their lengths are those of the sentence. */
    setSentence(text) {
      const follows = this.maskText.value === PRESETS.documents(this.n);
      this.sentence.value = text;
      this.edited = false;
      this.drawn = null;
      if (follows) this.maskText.value = PRESETS.documents(Math.min(Lesson.tokens(text).length, Lesson.MOST_TOKENS));
      this.read();
    }

    setMask(text) {
      this.maskText.value = text;
      this.maskSwitch.checked = true;
      this.drawn = null;
      this.read();
    }

    /** Reads the sentence and the mask; what cannot be read leaves the last good mask in force. */
    read() {
      const all = Lesson.tokens(this.sentence.value);
      this.tokens = all.slice(0, Lesson.MOST_TOKENS);
      this.n = this.tokens.length;
      if (this.drawn && this.drawn.length !== this.n) this.drawn = null;
      const remark = !this.n ? t("bench.empty") : all.length > this.n ? t("bench.cut", { n: this.n, all: all.length }) : "";
      this.find("[data-note=sentence]").textContent = remark;
      if (!this.edited) {
        this.x = Lesson.encodings(this.tokens);
        const maps = Lesson.data.example.maps;
        [this.q, this.k, this.v] = ["q", "k", "v"].map((name) => Lesson.product(this.x, maps[name]));
      }
      const note = this.find("[data-note=mask]");
      try {
        if (!this.drawn) {
          this.sees = Lesson.mask(this.maskText.value, this.n);
          this.lastGood = this.maskText.value;
        }
        this.problem = "";
        this.maskText.removeAttribute("aria-invalid");
      } catch (error) {
        this.keepLast();
        this.problem = `${error.message} ${t("bench.inforce", { mask: this.lastGood.trim() })}`;
        this.maskText.setAttribute("aria-invalid", "true");
      }
      note.textContent = this.problem;
      this.width.max = Math.max(2, Math.min(this.n, 32));
      const window = this.drawn ? null : WINDOW.exec(this.maskText.value);
      this.width.disabled = !window;
      if (window) this.width.value = window[1];
      this.find("[data-note=width]").textContent = window ? window[1] : t("bench.nowindow");
      this.compute();
    }

    /** The last mask that could be read stays in force; where the sentence has outgrown it, the causal mask. */
    keepLast() {
      try {
        this.sees = Lesson.mask(this.lastGood, this.n);
      } catch {
        this.lastGood = "causal";
        this.sees = Lesson.mask("causal");
      }
    }

    compute() {
      this.root.classList.toggle("no-tokens", !this.n);
      this.find("[data-note=replaced]").textContent = "";
      for (const button of this.presets) {
        const chosen = this.maskSwitch.checked && !this.drawn && this.maskText.value.trim() === PRESETS[button.dataset.preset](this.n);
        button.setAttribute("aria-pressed", chosen);
      }
      const before = this.steps && this.steps.weights;
      const asked = this.drawn || (this.n ? Lesson.table(this.sees, this.n) : []);
      this.asked = asked;
      this.visible = this.maskSwitch.checked ? asked : asked.map((row) => row.map(() => true));
      this.steps = Lesson.attend(this, this.visible);
      this.before = before;
      const rem = parseFloat(getComputedStyle(document.documentElement).fontSize);
      const fits = Math.max(3, Math.floor((this.root.clientWidth - 150) / (this.root.clientWidth < 700 ? 2.55 * rem : 46)) - 2);
      this.shown = Math.min(this.n, this.n <= 8 ? Math.max(fits, 4) : Math.min(5, fits));
      this.origin = Math.max(0, Math.min(this.origin, this.n - this.shown));
      this.show();
      this.python();
      if (this.onchange) this.onchange();
    }

    moveTo(origin) {
      this.origin = Math.max(0, Math.min(origin, this.n - this.shown));
      this.show();
    }

    range() { return Array.from({ length: this.shown }, (_, i) => i + this.origin); }

    show() {
      const rows = this.range();
      const both = [0, 1];
      const labels = { rowLabels: this.tokens, columnLabels: this.tokens };
      const { matrices, steps, visible } = this;
      const example = Lesson.data.example.maps;
      this.root.style.setProperty("--n", this.shown);
      const cell = Math.min(52, Math.floor((this.root.clientWidth - 380) / (3 * this.shown + 4)) - 2);
      if (cell >= 33) this.root.style.setProperty("--cell", `${cell}px`); // so that all matrices stand in one line
      else this.root.style.removeProperty("--cell");
      matrices.x.show({ values: this.x, rows, columns: both, ...labels });
      for (const name of ["q", "k", "v"]) {
        matrices[`W_${name}`].show({ values: example[name], rows: both, columns: both });
        this.maps[name].show({ values: this[name], rows, columns: both });
      }
      matrices.q.show({ values: this.q, rows, columns: both, ...labels });
      matrices.k.show({ values: Lesson.transposed(this.k), rows: this.n ? both : [], columns: rows, ...labels });
      matrices.v.show({ values: this.v, rows, columns: both, ...labels });
      const hides = (i, j) => (visible[i][j] ? "" : "hidden");
      matrices.scaled.show({ values: steps.scaled, rows, columns: rows });
      matrices.mask.show({
        values: visible, rows, columns: rows, ...labels, text: (x) => (x ? "0" : "−∞"), state: hides,
        note: (x, i, j) => t(x ? "equation.sees" : "equation.hides", { q: i + 1, k: j + 1 }),
      });
      matrices.masked.show({ values: steps.masked, rows, columns: rows, state: hides });
      matrices.weights.show({
        values: steps.weights, rows, columns: rows, ...labels, state: hides, shade: (x) => x,
        text: (x, i, j) => (visible[i][j] ? Lesson.number(x, 2) : "0"),
        note: (x, i, j) => `${t("equation.pair", { q: i + 1, k: j + 1 })}: ${visible[i][j] ? Lesson.number(x, 4) : t("word.hidden")}`,
      });
      matrices.output.show({ values: steps.output, rows, columns: both });
      const many = this.n > this.shown;
      this.find(".overview").hidden = !many;
      if (many) {
        const from = this.find("#view-from");
        from.max = this.n - this.shown + 1;
        from.value = this.origin + 1;
        this.find("[data-note=view]").textContent =
          t("bench.view", { n: this.n, cells: this.n * this.n, from: this.origin + 1, to: this.origin + this.shown });
        this.paint();
      }
      if (this.frame) this.frame();
      this.highlight();
    }

    /** All weights of a long sentence as one picture, a pixel each, with the part that the tables show framed. */
    paint() {
      const { n, shown, origin, visible } = this;
      if (n <= shown) return;
      const style = getComputedStyle(document.documentElement);
      const rgb = (name) => [1, 3, 5].map((at) => parseInt(style.getPropertyValue(name).trim().slice(at, at + 2), 16));
      const [hidden, paper, hue] = ["--hatch", "--card", "--w-hue"].map(rgb);
      const context = this.overview.getContext("2d");
      this.overview.width = this.overview.height = n;
      const image = context.createImageData(n, n);
      const pixels = new Uint32Array(image.data.buffer);
      const ready = Array.from({ length: 256 }, (_, level) => { // strengths of the hue; bytes in the order of the platform
        const bytes = new Uint8Array(4).fill(255);
        for (let c = 0; c < 3; c++) bytes[c] = paper[c] + (hue[c] - paper[c]) * (0.08 + 0.92 * (level / 255));
        return new Uint32Array(bytes.buffer)[0];
      });
      const unseen = new Uint32Array(new Uint8Array([...hidden, 255]).buffer)[0];
      for (let i = 0; i < n; i++) {
        const [row, seen] = [this.steps.weights[i], visible[i]];
        const most = Math.max(...row) || 1; // strength is beside the greatest weight of the row
        for (let j = 0; j < n; j++) pixels[i * n + j] = seen[j] ? ready[Math.round((255 * row[j]) / most)] : unseen;
      }
      context.putImageData(image, 0, 0);
      const frame = this.find(".frame").style;
      frame.left = frame.top = `${(100 * origin) / n}%`;
      frame.width = frame.height = `${(100 * shown) / n}%`;
    }

    pick(name, i, j) {
      this.picked = [name, i, j];
      this.highlight();
    }

    /** A tap on the mask draws; a tap elsewhere selects. */
    press(name, i, j) {
      if (name === "mask") {
        const table = this.asked.map((row) => [...row]);
        table[i][j] = !this.visible[i][j];
        const cell = document.activeElement;
        this.maskSwitch.checked = true;
        this.draw(table);
        if (cell && cell.isConnected) cell.focus();
      }
      this.pick(name, i, j);
    }

    /** A table drawn by hand is the mask; where a text has this table, the text is. */
    draw(table) {
      const named = this.n <= 16 ? Lesson.nameOf(table) : null;
      this.maskText.value = named ?? "";
      this.maskText.placeholder = t("bench.drawn");
      this.drawn = named ? null : table;
      this.read();
      if (this.drawn) this.find("[data-note=mask]").textContent = t("bench.drawn");
    }

    highlight() {
      const [name, i, j] = this.picked;
      const isKey = name === "k"; // shown transposed: (column, key)
      const sources = Lesson.sources(name, i, j);
      for (const [other, matrix] of [...Object.entries(this.matrices), ...Object.entries(this.maps)]) {
        const made = this.maps[other] === matrix;
        matrix.mark("from", made ? null : sources[other]);
        matrix.mark("self", other !== name ? null : made && isKey ? (a, b) => a === j && b === i : (a, b) => a === i && b === j);
      }
      const nudge = this.find(".nudge");
      nudge.hidden = !(name === "q" || name === "k");
      const equation = this.find(".equation");
      if (!this.n || !this.exists(name, i, j)) {
        Lesson.replace(equation, t("bench.point"));
        nudge.hidden = true;
        return;
      }
      const [a, b] = isKey ? [j, i] : [i, j];
      Lesson.replace(equation, ...Lesson.equation(name, a, b, { ...this, maps: Lesson.data.example.maps }));
      if (!nudge.hidden) {
        this.find("[data-note=nudge]").textContent = `${name}${a + 1},${b + 1}`;
        if (document.activeElement !== this.nudge) this.nudge.value = this[name][a][b];
      }
    }

    exists(name, i, j) {
      if (name.startsWith("W_")) return i < 2 && j < 2;
      const value = { scaled: this.steps.scaled, masked: this.steps.masked, weights: this.steps.weights, output: this.steps.output,
        mask: this.visible, k: Lesson.transposed(this.k) }[name] ?? this[name];
      return value.length > i && value[i].length > j;
    }

    /** A number of q or k, changed by hand. */
    change(value) {
      const [name, i, j] = this.picked;
      if ((name !== "q" && name !== "k") || !Number.isFinite(value)) return;
      this.edited = true;
      this[name] = this[name].map((row) => [...row]);
      if (name === "q") this.q[i][j] = value;
      else this.k[j][i] = value;
      this.compute();
    }

    /** Puts another word in the place of the last one, and says which rows of the weights changed. */
    replaceLast() {
      if (!this.n) return;
      const words = t("bench.words").split(" ");
      const last = this.tokens[this.n - 1];
      const word = words[(words.indexOf(last) + 1) % words.length];
      const before = this.steps.weights.map((row) => row.join());
      const spaced = this.sentence.value.trimEnd();
      this.sentence.value = spaced.slice(0, spaced.lastIndexOf(last)) + word;
      this.edited = false;
      this.read();
      const changed = this.steps.weights.map((row, i) => row.join() !== before[i]);
      this.matrices.weights.mark("changed", (i) => changed[i]);
      const rows = changed.flatMap((x, i) => (x ? [i + 1] : []));
      this.find("[data-note=replaced]").textContent = t(
        rows.length === 1 ? "bench.replaced.last" : "bench.replaced.all", { n: this.n, rows: rows.slice(0, 12).join(", "), last: this.n - 1 });
      setTimeout(() => this.matrices.weights.mark("changed", null), 1600);
    }

    python() {
      const mask = this.drawn && this.maskSwitch.checked
        ? `lowtri.table([${this.drawn.map((row) => `[${row.map((x) => (x ? "True" : "False")).join(", ")}]`).join(", ")}])`
        : JSON.stringify(this.maskSwitch.checked ? this.lastGood.trim() : "full");
      Lesson.python("bench", this.n ? Lesson.program(this, mask) : "import lowtri");
    }
  }

  const rowsOf = (m) => `[${m.map((row) => `[${row.join(", ")}]`).join(", ")}]`;

  /** The program that computes the same in lowtri. */
  Lesson.program = ({ tokens, x, q, k, v, edited }, mask) => {
    const names = `[${tokens.map((token) => JSON.stringify(token)).join(", ")}]`;
    if (edited) {
      return `import lowtri\n\nq = ${rowsOf(q)}\nk = ${rowsOf(k)}\nv = ${rowsOf(v)}\n` +
        `print(lowtri.explain((q, k, v), tokens=${names}, mask=${mask}))`;
    }
    return "import torch, lowtri\n\ntorch.manual_seed(42)\nmodule = lowtri.plain.MaskedSelfAttention(d_model=2)\n" +
      `x = ${rowsOf(x)}\nprint(lowtri.explain(module, x, tokens=${names}, mask=${mask}))`;
  };

  Lesson.Workbench = Workbench;
})();
