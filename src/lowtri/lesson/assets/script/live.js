"use strict";
// The two models that run in the page, one trained with the mask and one without: the reader's own text, the next characters, and
// what each model makes of the text all at once and one character at a time. The arithmetic is in decoder.js.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t, decoder } = Lesson;
  const MANY = 40; // characters that the button writes
  const BARS = 8;
  const SEED = 1;
  const PERCENT = 0.0995; // from here on without decimals

  const percent = (p) => `${Lesson.number(100 * p, p >= PERCENT || p < 0.0005 ? 0 : 1)} %`;
  const odds = (p) => (p >= 0.01 ? percent(p) : t("live.odds", { n: Math.round(Number((1 / p).toPrecision(2))) }));
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));

  /** A character alone: blanks and line ends are drawn, and a mark of Thai stands on a circle. */
  const shown = (c) => {
    if (c === " ") return "␣";
    if (c === "\n") return "⏎";
    return /\p{M}/u.test(c) ? `◌${c}` : c;
  };

  /** Numbers from 0 to 1 that are the same for the same seed, so that models can be compared under the same dice (mulberry32). */
  const dice = (seed) => () => {
    seed = (seed + 0x6d2b79f5) | 0;
    let x = Math.imul(seed ^ (seed >>> 15), 1 | seed);
    x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };

  class Live {
    constructor(root) {
      this.root = root;
      this.find = (selector) => root.querySelector(selector);
      this.models = { causal: decoder.load(Lesson.data.models.causal), full: decoder.load(Lesson.data.models.full) };
      this.characters = this.models.causal.characters;
      this.limit = this.models.causal.context - 1; // one place is left for the character to come
      this.starts = t("live.begin").split("|");
      this.text = this.find("textarea");
      this.mask = this.find("#live-mask");
      this.temperature = this.find("#live-temperature");
      this.name = "causal";
      this.shift = -1; // on which side the head to open looks; 0 once it is open
      this.memory = new Map(); // logits of the last place, of each model, mask and text
      this.random = dice(SEED);
      this.map = new Lesson.LiveMap(this);
      this.listen();
      this.begin(this.starts[0]);
    }

    get model() { return this.models[this.name]; }

    listen() {
      this.text.addEventListener("input", () => this.begin(this.text.value));
      this.find("[data-place=starts]").append(...this.starts.map((start) =>
        el("button", { type: "button", onclick: () => this.begin(start) }, `${start.trim()} …`)));
      for (const button of this.root.querySelectorAll("[data-model]")) {
        button.addEventListener("click", () => {
          this.name = button.dataset.model;
          this.mask.checked = this.name === "causal"; // as it was trained
          this.shift = this.name === "causal" ? -1 : 1;
          this.draw();
        });
      }
      this.mask.addEventListener("change", () => this.draw());
      this.temperature.addEventListener("input", () => this.bars());
      this.button("one").addEventListener("click", () => this.step());
      this.button("many").addEventListener("click", () => this.many());
      this.button("back").addEventListener("click", () => this.begin(this.own));
      this.button("both").addEventListener("click", () => this.both());
      this.losses();
    }

    button(name) { return this.find(`[data-live=${name}]`); }

    note(name, text) { this.find(`[data-note=live-${name}]`).textContent = text; }

    /** The reader's own text: what a model writes after it is no test of the model. */
    begin(text) {
      this.writing = false;
      this.own = text;
      if (this.text.value !== text) this.text.value = text;
      this.random = dice(SEED);
      Lesson.replace(this.find("[data-place=written]"));
      this.draw();
    }

    read() {
      const unknown = [...new Set(this.text.value.toLowerCase())].filter((c) => !this.characters.includes(c));
      const ids = decoder.encode(this.model, this.text.value);
      const remarks = [];
      if (unknown.length) remarks.push(t("live.unknown", { characters: unknown.map(Lesson.spelled).join(" ") }));
      if (ids.length >= this.limit) remarks.push(t("live.limit", { n: this.limit }));
      this.note("text", remarks.join(" ") || t("live.note"));
      return ids.slice(0, this.limit);
    }

    draw() {
      this.ids = this.read();
      this.version = (this.version ?? 0) + 1;
      const { ids } = this;
      const masked = this.mask.checked;
      for (const button of this.root.querySelectorAll("[data-model]")) {
        button.setAttribute("aria-pressed", button.dataset.model === this.name);
      }
      this.note("state", t(`live.${this.name}.${masked ? "on" : "off"}`));
      const isFull = !ids.length || ids.length >= this.limit;
      for (const name of ["one", "many", "both"]) this.button(name).disabled = isFull && !this.writing;
      this.root.classList.toggle("no-text", !ids.length);
      if (!ids.length) return;
      this.out = decoder.forward(this.model, ids, masked);
      this.bars();
      if (this.writing) return; // the rest is drawn when it has written
      this.strip("atonce", ids.slice(1).map((id, i) => decoder.chances(this.out.logits[i])[id]));
      this.stepwise(this.version);
      this.leak();
      if (this.shift) this.map.choose(this.shift);
      this.shift = 0;
      this.map.draw();
    }

    // The next character.

    bars() {
      const degrees = Number(this.temperature.value);
      this.note("temperature", Lesson.number(degrees, 1));
      if (!this.ids.length) return;
      const chances = [...decoder.chances(this.out.logits[this.ids.length - 1], degrees)];
      const best = chances.map((chance, id) => ({ chance, id })).sort((a, b) => b.chance - a.chance).slice(0, BARS);
      const isFull = this.ids.length >= this.limit;
      Lesson.replace(this.find(".next"), best.map(({ chance, id }) => el("li", {},
        el("button", { type: "button", disabled: isFull, onclick: () => this.append(id) },
          el("b", {}, shown(this.characters[id])), el("i", { style: { width: `${100 * chance}%` } }), el("span", {}, percent(chance))))));
    }

    append(id) {
      this.text.value = this.ids.map((each) => this.characters[each]).join("") + this.characters[id];
      this.text.scrollTop = this.text.scrollHeight;
      this.draw();
    }

    step() {
      const chances = decoder.chances(this.out.logits[this.ids.length - 1], Number(this.temperature.value));
      this.append(decoder.draw(chances, this.random()));
    }

    async many() {
      const button = this.button("many");
      if (this.writing) {
        this.writing = false;
        return;
      }
      this.writing = true;
      button.textContent = t("live.stop");
      for (let n = 0; n < MANY && this.writing && this.ids.length < this.limit; n++) {
        this.step();
        if (Lesson.moves()) await pause(30);
        else if (n % 10 === 9) await pause(0); // without motion the text grows in steps
      }
      this.writing = false;
      button.textContent = t("live.many");
      this.draw();
    }

    // How well each character of the reader was predicted.

    strip(name, chances) {
      const own = decoder.encode(this.model, this.own).length;
      const box = this.find(`.strip[data-place=${name}]`);
      const level = (p, place) => {
        if (place >= own) return "made";
        if (p === undefined) return "wait";
        return ["c0", "c1", "c2", "c3"][(p >= 0.05) + (p >= 0.3) + (p >= 0.8)];
      };
      Lesson.replace(box, this.ids.map((id, place) =>
        el("span", { class: place ? level(chances[place - 1], place) : "made" }, shown(this.characters[id]))));
      const mine = chances.slice(0, own - 1);
      const losses = mine.filter((p) => p !== undefined).map((p) => -Math.log(Math.max(p, 1e-30)));
      const loss = losses.reduce((sum, x) => sum + x, 0) / losses.length;
      const isReady = losses.length === mine.length && losses.length > 0;
      this.note(name, isReady ? t("live.loss", { loss: Lesson.number(loss), odds: odds(Math.exp(-loss)) }) : "…");
    }

    /** Under the mask a row does not change when text is added; without it each prefix is another computation. */
    async stepwise(version) {
      const { ids } = this;
      const chances = new Array(ids.length - 1).fill(undefined);
      const masked = this.mask.checked;
      let began = performance.now();
      for (let n = 1; n < ids.length; n++) {
        const logits = masked ? this.out.logits[n - 1] : this.last(ids.slice(0, n));
        chances[n - 1] = decoder.chances(logits)[ids[n]];
        if (performance.now() - began < 12) continue;
        this.strip("stepwise", chances);
        await pause(0);
        if (version !== this.version) return;
        began = performance.now();
      }
      this.strip("stepwise", chances);
    }

    last(ids, name = this.name, masked = this.mask.checked) {
      const key = `${name}${masked}${ids}`;
      if (this.memory.size > 4000) this.memory.clear();
      if (!this.memory.has(key)) {
        this.memory.set(key, decoder.forward(this.models[name], ids, masked).logits[ids.length - 1]);
      }
      return this.memory.get(key);
    }

    /** With another last character: at how many places before it does the prediction change? Compared bit by bit. */
    leak() {
      const n = this.ids.length - 1;
      const other = (this.ids[n] + 1) % this.characters.length;
      const { logits } = decoder.forward(this.model, [...this.ids.slice(0, n), other], this.mask.checked);
      const changed = this.ids.slice(0, n).filter((_, i) => this.out.logits[i].some((x, c) => x !== logits[i][c]));
      this.note("leak", n ? t("live.leak", { changed: changed.length, n }) : "");
    }

    // Both models from the same start, under the same dice.

    async both() {
      const prompt = decoder.encode(this.model, this.own).slice(0, this.limit);
      const degrees = Number(this.temperature.value);
      const runs = [["causal", true, "live.causal"], ["full", false, "live.full"], ["causal", false, "live.taken"]];
      const version = this.version;
      const panels = runs.map(([name, masked, title]) => {
        const rest = el("span");
        const given = prompt.map((id) => this.characters[id]).join("");
        const panel = el("div", {}, el("h4", {}, t(title)), el("pre", { tabindex: 0, role: "group", "aria-label": t(title) }, el("mark", {}, given), rest));
        return { name, masked, rest, panel, ids: [...prompt], random: dice(SEED) };
      });
      Lesson.replace(this.find("[data-place=written]"), panels.map(({ panel }) => panel));
      for (let n = 0; n < MANY && prompt.length + n < this.limit; n++) {
        for (const run of panels) {
          const chances = decoder.chances(this.last(run.ids, run.name, run.masked), degrees);
          run.ids.push(decoder.draw(chances, run.random()));
          run.rest.textContent = run.ids.slice(prompt.length).map((id) => this.characters[id]).join("");
        }
        await pause(Lesson.moves() ? 20 : 0);
        if (version !== this.version) return;
      }
    }

    losses() {
      const { causal, full } = this.models;
      const of = (model) => ["training", "validation", "stepwise"].map((name) => model.measured.losses[name]);
      const known = (name) => Array(3).fill(causal.measured.losses[name]);
      const rows = [["live.causal", of(causal)], ["live.full", of(full)], ["live.entropy", known("entropy")], ["live.uniform", known("uniform")]];
      this.find("tbody").append(...rows.map(([title, values]) => el("tr", {}, el("th", { scope: "row" }, t(title)),
        values.map((x) => el("td", {}, Lesson.number(x, 3))))));
    }
  }

  Lesson.shownCharacter = shown;
  Lesson.percent = percent;
  Lesson.figures.push(function live() { Lesson.live = new Live(document.getElementById("live")); });
})();
