"use strict";
// Figures of what was measured: the experiment's curves and texts, times, maps of real models, wrong attentions.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;
  const find = (id, selector) => document.querySelector(`#${id} ${selector}`);

  function curves() {
    const { masked, unmasked, unigram } = Lesson.data.experiment;
    const box = find("curves", ".plot");
    const width = Math.max(300, Math.min(760, box.clientWidth));
    const roomy = width > 560; // names beside the curves; below them on narrow screens
    const svg = el("svg", { viewBox: `0 0 ${width} 320`, role: "img", "aria-label": t("without.caption"), width: "100%" });
    const last = masked.curve[masked.curve.length - 1].step;
    const top = 5.5;
    const x = (step) => 44 + (step / last) * (width - (roomy ? 300 : 70));
    const y = (loss) => 280 - (loss / top) * 262;
    const line = (points, style) => el("polyline", { points: points.map(([s, l]) => `${x(s)},${y(Math.min(l, top))}`).join(" "), fill: "none", "stroke-width": 3, "stroke-linejoin": "round", style });
    const ticks = [0, 1, 2, 3, 4, 5].flatMap((l) => [
      el("line", { class: "axis", x1: 44, x2: x(last), y1: y(l), y2: y(l) }),
      el("text", { class: "faint", x: 34, y: y(l) + 5, "text-anchor": "end", "font-size": 13 }, l)]);
    const steps = masked.curve.map(({ step }) => el("text", { class: "faint", x: x(step), y: 302, "text-anchor": "middle", "font-size": 13 }, step));
    const of = (model, what) => model.curve.map((point) => [point.step, point[what]]);
    const label = (height, text, hue) => el("text", { x: x(last) + 12, y: height + 5, "font-size": 13, "font-weight": 600, style: `fill: var(${hue})` }, text);
    const end = (model, what) => y(model.curve[model.curve.length - 1][what]);
    svg.append(...ticks, ...steps,
      el("line", { x1: 44, x2: x(last), y1: y(unigram), y2: y(unigram), "stroke-dasharray": "2 5", style: "stroke: var(--soft)", "stroke-width": 2 }),
      line(of(unmasked, "validation"), "stroke: var(--k-hue)"), line(of(unmasked, "stepwise"), "stroke: var(--k-hue); stroke-dasharray: 9 5"),
      line(of(masked, "validation"), "stroke: var(--w-hue)"), line(of(masked, "stepwise"), "stroke: var(--card); stroke-dasharray: 9 9; stroke-width: 1.5"));
    const heights = [end(unmasked, "stepwise"), y(unigram), end(masked, "stepwise"), end(unmasked, "validation")];
    if (Math.abs(heights[0] - heights[1]) < 18) heights[heights[0] < heights[1] ? 1 : 0] += 18 - Math.abs(heights[0] - heights[1]);
    const names = [
      label(heights[0], `${t("without.unmasked")}, ${t("without.stepwise")}`, "--k-hue"), label(heights[1], t("without.unigram"), "--soft"),
      label(heights[2], `${t("without.masked")}, ${t("without.both")}`, "--w-hue"), label(heights[3], `${t("without.unmasked")}, ${t("without.forced")}`, "--k-hue")];
    const key = (name, hue, style) => el("span", {}, el("i", { style: `border-top: 3px ${style} var(${hue}); height: .5em; width: 1.6em; border-radius: 0` }), name);
    if (!roomy) {
      box.append(el("p", { class: "legend" }, key(`${t("without.unmasked")}, ${t("without.stepwise")}`, "--k-hue", "dashed"), key(t("without.unigram"), "--soft", "dotted"),
        key(`${t("without.masked")}, ${t("without.both")}`, "--w-hue", "solid"), key(`${t("without.unmasked")}, ${t("without.forced")}`, "--k-hue", "solid")));
    }
    svg.append(...(roomy ? names : []),
      el("text", { class: "faint", x: 44, y: 12, "font-size": 13 }, t("without.loss")), el("text", { class: "faint", x: x(last), y: 318, "text-anchor": "end", "font-size": 13 }, t("without.step")));
    box.prepend(svg);
    const text = Lesson.data.experiment.texts[0];
    const shown = (prompt, rest) => el("pre", { tabindex: 0 }, el("mark", {}, prompt.trim()), rest);
    find("texts", ".written").append(
      el("div", {}, el("h3", {}, t("without.masked")), shown(text.prompt, text.masked)),
      el("div", {}, el("h3", {}, t("without.unmasked")), shown(text.prompt, text.unmasked)));
  }

  function bars(box, entries) {
    const most = Math.max(...entries.map(([, value]) => value));
    box.classList.add("hbars");
    box.append(...entries.map(([label, value, shown, hue]) => el("div", {}, el("span", {}, label),
      el("i", { style: { width: `${Math.max(0.5, (100 * value) / most)}%`, "--hue": `var(${hue})` }, "aria-hidden": "true" }), el("b", {}, shown))));
  }

  function forms() {
    const { times } = Lesson.data.forms;
    bars(find("forms-figure", ".bars"), ["additive", "boolean", "fused", "lowtri"].map((name) =>
      [t(`forms.${name}`), times[name], `${Lesson.number(times[name])} ms`, name === "lowtri" ? "--w-hue" : "--q-hue"]));
    const { modes } = Lesson.data.experiment;
    const rows = Object.entries(modes).flatMap(([layers, mode]) => Object.entries(mode).map(([name, size]) =>
      [`${layers === "1" ? t("cache.layer") : t("cache.layers", { n: layers })}: ${t(`cache.mode.${name}`)}`, size, size < 0.001 ? Lesson.exponential(size, 0) : Lesson.number(size), size < 0.001 ? "--w-hue" : "--bad"]));
    bars(find("modes", ".bars"), rows);
  }

  /** The texts of three models as far as they have written, and the numbers that each carries by then. */
  function written() {
    const PROMPT = 2; // which of the stored prompts
    const { generators, experiment } = Lesson.data;
    const box = find("written", ".written");
    const slider = document.getElementById("written-bytes");
    const { prompt, masked } = experiment.texts[PROMPT];
    const encoder = new TextEncoder();
    const read = encoder.encode(prompt).length;
    const panels = ["rnn", "lstm", "attention"].map((name) => {
      const isAttention = name === "attention";
      const loss = isAttention ? experiment.masked.validation : generators[name].validation;
      const text = isAttention ? masked : generators[name].texts[PROMPT];
      const [carries, rest] = [el("p", { class: "hint" }), el("span")];
      box.append(el("div", {}, el("h3", {}, t(`recurrent.${name}`)), el("p", { class: "hint" }, t("recurrent.loss", { loss: Lesson.number(loss) })), carries,
        el("pre", { tabindex: 0, role: "group", "aria-label": t(`recurrent.${name}`) }, el("mark", {}, prompt), rest)));
      return { text: [...text], rest, says: (n) => {
        const numbers = generators[name].carries * (isAttention ? read + n : 1);
        carries.textContent = t("recurrent.carries", { n: numbers });
      } };
    });
    const draw = () => {
      const n = Number(slider.value);
      find("written", "[data-note=bytes]").textContent = n;
      for (const { text, rest, says } of panels) {
        rest.textContent = text.slice(0, n).join("");
        says(n);
      }
    };
    slider.addEventListener("input", draw);
    draw();
  }

  /** The lower triangles of one model, from base64. */
  function unpacked({ maps, shape }) {
    const bytes = Uint8Array.from(atob(maps), (c) => c.charCodeAt(0));
    const numbers = new Uint16Array(bytes.buffer);
    const [layers, heads, n] = shape;
    const each = (n * (n + 1)) / 2;
    return (l, h, i, j) => (j > i ? 0 : numbers[(l * heads + h) * each + (i * (i + 1)) / 2 + j] / 65535);
  }

  function maps() {
    const models = Lesson.data.maps;
    const [chips, thumbs, open] = [find("maps", ".chips"), find("maps", ".thumbs"), find("maps", ".open")];
    const says = find("maps", ".says");
    const dark = () => getComputedStyle(document.documentElement).getPropertyValue("--w-hue").trim();
    const matrix = new Lesson.Matrix({ name: "map", kind: "w", title: "", labelRows: true, labelColumns: true, onpick: (_, i, j) => point(i, j) });
    open.append(matrix.node);
    let model = null, at = null, layer = 0, head = 0;
    const buttons = models.map((it) => {
      const button = el("button", { type: "button", onclick: () => choose(it) }, it.name);
      chips.append(button);
      return [it, button];
    });
    function paint(canvas, l, h) {
      const n = model.shape[2];
      canvas.width = canvas.height = n;
      const context = canvas.getContext("2d");
      context.fillStyle = dark();
      for (let i = 0; i < n; i++) for (let j = 0; j <= i; j++) {
        context.globalAlpha = at(l, h, i, j) ** 0.7;
        context.fillRect(j, i, 1, 1);
      }
    }
    function choose(it) {
      [model, at] = [it, unpacked(it)];
      for (const [other, button] of buttons) button.setAttribute("aria-pressed", other === it);
      Lesson.python("maps", Lesson.data.programs[it.program]);
      const [layers, heads] = it.shape;
      thumbs.style.setProperty("--layers", layers);
      thumbs.style.setProperty("--heads", heads);
      const made = [];
      for (let l = 0; l < layers; l++) for (let h = 0; h < heads; h++) {
        const canvas = el("canvas");
        paint(canvas, l, h);
        made.push(el("button", { type: "button", "data-map": `${l},${h}`, tabindex: l + h ? -1 : 0, "aria-label": t("models.thumb", { l, h }), onclick: () => show(l, h) }, canvas));
      }
      Lesson.replace(thumbs, made);
      show(...it.opens);
    }
    thumbs.addEventListener("keydown", (event) => {
      const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
      if (!(event.key in moves)) return;
      event.preventDefault();
      if (getComputedStyle(thumbs).gridAutoFlow === "column") for (const move of Object.values(moves)) move.reverse();
      const next = thumbs.querySelector(`[data-map="${layer + moves[event.key][0]},${head + moves[event.key][1]}"]`);
      if (next) { next.click(); next.focus(); }
    });
    function show(l, h) {
      [layer, head] = [l, h];
      for (const button of thumbs.children) {
        const chosen = button.dataset.map === `${l},${h}`;
        button.setAttribute("aria-pressed", chosen);
        button.tabIndex = chosen ? 0 : -1;
      }
      const n = model.shape[2];
      const every = Array.from({ length: n }, (_, i) => i);
      matrix.caption.textContent = t("models.thumb", { l, h });
      matrix.show({ values: every.map((i) => every.map((j) => at(l, h, i, j))), rows: every, columns: every, rowLabels: model.tokens, columnLabels: model.tokens,
        shade: (x) => x, state: (i, j) => (j > i ? "hidden" : ""), text: (x, i, j) => (j > i ? "" : Lesson.number(x)),
        note: (x, i, j) => (j > i ? t("word.hidden") : Lesson.number(x, 3)) });
      const opened = model.opens[0] === l && model.opens[1] === h;
      const q = opened ? model.points[0] : n - 1;
      const most = every.reduce((a, b) => (at(l, h, q, b) > at(l, h, q, a) ? b : a));
      matrix.mark("self", (i, j) => i === q && j === most);
      says.textContent = t("models.says", { name: model.name, l, h, q: model.tokens[q].trim(), k: model.tokens[most].trim(), w: Lesson.number(at(l, h, q, most)) });
    }
    function point(i, j) {
      matrix.mark("self", (a, b) => a === i && b === j);
      says.textContent = t("models.cell", { l: layer, h: head, q: model.tokens[i].trim(), k: model.tokens[j].trim(), w: j > i ? t("word.hidden") : Lesson.number(at(layer, head, i, j), 3) });
    }
    choose(models[0]);
    Lesson.repaint = () => choose(model);
  }

  const NOISE = 0.99; // a loss of white noise below this is no accident
  const LOOKS = { "█": "seen", "○": "blind", "▒": "soft", "·": "hid", "✗": "leak" };

  function gallery() {
    const box = find("gallery-figure", ".gallery");
    const key = (style, text) => el("span", {}, el("i", { style }), text);
    box.before(el("p", { class: "legend" }, key("background: var(--w-hue)", t("gallery.seen")), key("border: 1px solid var(--w-hue)", t("gallery.blind")),
      key("background: var(--hatch)", t("gallery.hidden")), key("background: var(--bad)", t("gallery.leak"))));
    for (const piece of Lesson.data.gallery.pieces) {
      const [q, k] = piece.pair;
      const shown = piece.loss === null ? "" : Lesson.number(piece.loss, 3); // with the digits that the verdict is about
      const loss = piece.loss === null ? t("gallery.noloss") : t(piece.loss < NOISE ? "gallery.loss" : "gallery.honest", { loss: shown });
      box.append(el("article", {}, el("h3", {}, t(`gallery.${piece.name}`)),
        Lesson.grid(piece.cells.map((row) => [...row].map((sign) => LOOKS[sign])), t(`gallery.${piece.name}`)),
        el("p", {}, el("code", {}, piece.mask)), el("p", {}, t("gallery.pair", { q, k })), el("p", {}, loss)));
    }
  }

  Lesson.figures.push(written, curves, forms, maps, gallery);
})();
