"use strict";
// The step mode of the workbench: scores, mask, softmax, output; of each one cell, then one row, then the whole matrix.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;
  const STAGES = ["scaled", "masked", "weights", "output"];
  const FLOWS = { scaled: ["q", "k"], masked: ["scaled", "mask"], weights: ["masked"], output: ["weights", "v"] };

  Lesson.Walk = class {
    constructor(bench) {
      this.bench = bench;
      this.at = -1; // the frame; -1: everything is shown
      this.bar = bench.root.querySelector(".walk");
      this.track = this.bar.querySelector(".track");
      this.start = this.bar.querySelector("[data-walk=start]");
      this.back = this.bar.querySelector("[data-walk=back]");
      this.next = this.bar.querySelector("[data-walk=next]");
      this.start.addEventListener("click", () => this.go(this.at < 0 ? 0 : -1));
      this.back.addEventListener("click", () => this.go(Math.max(0, this.at - 1)));
      this.next.addEventListener("click", () => this.go(this.at + 1 < 12 ? this.at + 1 : -1));
      Lesson.replace(this.track, Array.from({ length: 12 }, () => el("li")));
      bench.frame = () => this.hide();
      this.go(-1);
    }

    /** The cell that the walk follows: in the last row shown, the second column. */
    cell(stage) {
      const { origin, shown } = this.bench;
      return [origin + Math.min(shown - 1, 2), stage === "output" ? 0 : origin + Math.min(1, shown - 1)];
    }

    go(at) {
      this.at = this.bench.n ? at : -1;
      const walking = this.at >= 0;
      this.start.textContent = t(walking ? "walk.stop" : "walk.start");
      this.back.hidden = this.next.hidden = this.track.hidden = !walking;
      this.back.disabled = this.at === 0;
      [...this.track.children].forEach((li, n) => li.classList.toggle("done", n <= this.at));
      const says = this.bar.querySelector("[data-note=walk]");
      if (walking) {
        const stage = STAGES[Math.floor(this.at / 3)];
        says.textContent = t(`walk.${stage}.${(this.at % 3) + 1}`);
        this.bench.picked = [stage, ...this.cell(stage)];
      } else says.textContent = "";
      this.bench.show();
      if (walking) this.fly();
    }

    /** Hides what the walk has not reached. */
    hide() {
      const stage = Math.floor(this.at / 3);
      STAGES.forEach((name, n) => {
        const [i, j] = this.cell(name);
        const unit = this.at % 3;
        const done = (a, b) => this.at < 0 || n < stage || (n === stage && (unit === 2 || (a === i && (unit === 1 || b === j))));
        this.bench.matrices[name].mark("todo", (a, b) => !done(a, b));
      });
    }

    fly() {
      const stage = STAGES[Math.floor(this.at / 3)];
      if (this.at % 3 !== 0) return;
      const [i, j] = this.cell(stage);
      const sources = Lesson.sources(stage, i, j);
      const from = FLOWS[stage].flatMap((name) =>
        [...this.bench.matrices[name].body.querySelectorAll("td")].filter((td) => sources[name](Number(td.dataset.i), Number(td.dataset.j))));
      Lesson.fly(from, this.bench.matrices[stage].cell(i, j));
    }
  };
})();
