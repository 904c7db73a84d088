"use strict";
// The attention of the live models on the reader's text: a small picture for each layer and head, and one of them large.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;
  const CELL = 22; // pixels
  const PEEKS = 0.25; // of its attention to the next character: a head that copies

  /** How much of its attention a head gives on average to the character `shift` places on. */
  function given(weights, shift) {
    const rows = weights.map((row, i) => row[i + shift]).filter((share, i) => i > 0 && share !== undefined);
    return rows.length ? rows.reduce((sum, share) => sum + share, 0) / rows.length : 0;
  }

  Lesson.LiveMap = class {
    constructor(live) {
      this.live = live;
      this.layer = 0;
      this.head = 0;
      this.row = null;
      this.thumbs = live.find(".thumbs");
      this.canvas = live.find("canvas.map");
      const { layers, heads } = live.models.causal;
      this.thumbs.style.setProperty("--heads", heads);
      this.thumbs.style.setProperty("--layers", layers);
      for (let layer = 0; layer < layers; layer++) {
        for (let head = 0; head < heads; head++) {
          const name = t("models.thumb", { l: layer, h: head });
          this.thumbs.append(el("button", { type: "button", "aria-label": name, title: name, onclick: () => this.open(layer, head) }, el("canvas")));
        }
      }
      this.canvas.addEventListener("pointermove", (event) => {
        const box = this.canvas.getBoundingClientRect();
        this.look(Math.floor(((event.clientY - box.top) / box.height) * (this.count + 1)) - 1);
      });
      this.canvas.addEventListener("keydown", (event) => {
        const moves = { ArrowUp: -1, ArrowDown: 1 };
        if (!(event.key in moves)) return;
        event.preventDefault();
        this.look((this.row ?? this.count) + moves[event.key]);
      });
      let width = 0;
      new ResizeObserver(([entry]) => {
        if (entry.contentRect.width !== width && live.out) this.draw();
        width = entry.contentRect.width;
      }).observe(this.canvas.parentElement);
      matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => live.out && this.draw());
    }

    /** Opens the head that gives the most to the neighbour on this side: 1 is the next character, -1 the one before. */
    choose(shift) {
      const { attention } = this.live.out;
      let most = -1;
      attention.forEach((heads, layer) => heads.forEach((weights, head) => {
        const share = given(weights, shift);
        if (share <= most) return;
        most = share;
        this.layer = layer;
        this.head = head;
      }));
    }

    open(layer, head) {
      this.layer = layer;
      this.head = head;
      this.draw();
    }

    look(row) {
      this.row = Math.max(0, Math.min(this.count - 1, row));
      this.draw();
    }

    draw() {
      const { attention } = this.live.out;
      const style = getComputedStyle(document.documentElement);
      const colour = (name) => style.getPropertyValue(name).trim();
      [...this.thumbs.children].forEach((button, n) => {
        const { heads } = this.live.models.causal;
        const [layer, head] = [Math.floor(n / heads), n % heads];
        const weights = attention[layer][head];
        button.setAttribute("aria-pressed", layer === this.layer && head === this.head);
        button.classList.toggle("peeks", given(weights, 1) > PEEKS);
        const canvas = button.firstChild;
        canvas.width = canvas.height = weights.length;
        const context = canvas.getContext("2d");
        weights.forEach((row, i) => row.forEach((share, j) => {
          context.globalAlpha = share ** 0.7;
          context.fillStyle = colour(j > i ? "--bad" : "--w-hue");
          context.fillRect(j, i, 1, 1);
        }));
      });
      this.large(attention[this.layer][this.head], colour);
      this.says(attention[this.layer][this.head]);
    }

    /** The last characters of the text, as many as fit; what a character sees of its own future is red. */
    large(weights, colour) {
      const { canvas } = this;
      const { ids, characters, mask } = this.live;
      const room = canvas.parentElement.clientWidth;
      this.count = Math.min(weights.length, Math.max(8, Math.floor(room / CELL) - 1), 32);
      this.from = weights.length - this.count;
      if (this.row !== null) this.row = Math.min(this.row, this.count - 1);
      const side = CELL * (this.count + 1);
      const ratio = globalThis.devicePixelRatio || 1;
      canvas.width = canvas.height = side * ratio;
      canvas.style.width = canvas.style.height = `${side}px`;
      const context = canvas.getContext("2d");
      context.scale(ratio, ratio);
      context.font = "14px ui-monospace, monospace";
      context.textAlign = "center";
      context.textBaseline = "middle";
      for (let i = 0; i < this.count; i++) {
        const label = Lesson.shownCharacter(characters[ids[this.from + i]]);
        context.globalAlpha = 1;
        context.fillStyle = colour(i === this.row ? "--ink" : "--soft");
        context.fillText(label, CELL / 2, CELL * (i + 1.5));
        context.fillText(label, CELL * (i + 1.5), CELL / 2);
        for (let j = 0; j < this.count; j++) {
          const hidden = mask.checked && j > i;
          context.globalAlpha = hidden ? 0.3 : 0.06 + 0.94 * weights[this.from + i][this.from + j] ** 0.7;
          context.fillStyle = colour(hidden ? "--hatch" : j > i ? "--bad" : "--w-hue");
          context.fillRect(CELL * (j + 1), CELL * (i + 1), CELL - 1, CELL - 1);
        }
      }
      if (this.row === null) return;
      context.globalAlpha = 1;
      context.strokeStyle = colour("--ink");
      context.lineWidth = 1.5;
      context.strokeRect(CELL - 1, CELL * (this.row + 1) - 1, CELL * this.count + 1, CELL + 1);
    }

    says(weights) {
      const { ids, characters } = this.live;
      const next = given(weights, 1);
      const parts = [t("live.head", { l: this.layer, h: this.head, n: this.count })];
      if (next > PEEKS) parts.push(t("live.peek", { share: Lesson.percent(next) }));
      if (this.row !== null) {
        const place = this.from + this.row;
        const best = [...weights[place]].map((share, j) => ({ share, j })).sort((a, b) => b.share - a.share).slice(0, 3);
        const list = best.map(({ share, j }) => `${Lesson.shownCharacter(characters[ids[j]])} ${Lesson.percent(share)}`).join(", ");
        parts.push(t("live.row", { q: Lesson.shownCharacter(characters[ids[place]]), list }));
      }
      this.live.note("map", parts.join(" "));
      this.canvas.setAttribute("aria-label", t("models.thumb", { l: this.layer, h: this.head }));
    }
  };
})();
