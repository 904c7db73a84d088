"use strict";
// The smaller figures: who sees whom, the exponential, encoder beside decoder, teacher forcing, generators, cache, patterns.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;
  const find = (id, selector) => document.querySelector(`#${id} ${selector}`);

  /** Back and next buttons that walk through `count` steps. */
  function walked(id, count, show, first = 0) {
    let at = 0;
    const [back, next] = [find(id, "[data-action=back]"), find(id, "[data-action=next]")];
    const go = (to) => {
      at = Math.max(0, Math.min(count() - 1, to));
      back.disabled = at === 0;
      next.disabled = at === count() - 1;
      show(at);
    };
    back.addEventListener("click", () => go(at - 1));
    next.addEventListener("click", () => go(at + 1));
    go(first);
    return () => go(at);
  }

  function arcs() {
    const words = Lesson.data.sentences.cat;
    const box = find("arcs", ".arcs");
    const masked = document.getElementById("arcs-mask");
    let at = Math.min(2, words.length - 1);
    const strip = el("div", { class: "words" });
    const drawing = el("svg", { height: 96, "aria-hidden": "true" });
    box.append(drawing, strip);
    const picture = el("div", { class: "triangle" });
    box.after(picture);
    const buttons = words.map((word, i) =>
      el("button", { type: "button", onclick: () => { at = i; draw(); } }, el("bdi", {}, word)));
    strip.style.flexWrap = "nowrap";
    strip.append(...buttons);
    const lines = words.map(() => el("path", { fill: "none", "stroke-width": 3, "stroke-linecap": "round" }));
    drawing.append(...lines);
    function draw() {
      const n = words.length;
      drawing.setAttribute("width", Math.max(strip.scrollWidth, 40));
      const middle = buttons.map((b) => b.offsetLeft - strip.offsetLeft + b.offsetWidth / 2);
      let visible = 0;
      buttons.forEach((button, k) => {
        const sees = !masked.checked || k <= at;
        visible += sees;
        button.setAttribute("aria-pressed", k === at);
        button.classList.toggle("unseen", !sees);
        const [a, b] = [middle[at], middle[k]];
        const height = 92 - Math.min(84, 16 + Math.abs(a - b) * 0.28);
        lines[k].setAttribute("d", k === at ? `M${a - 9} 92 C${a - 18} 62 ${a + 18} 62 ${a + 9} 92` : `M${a} 92 C${a} ${height} ${b} ${height} ${b} 92`);
        lines[k].style.stroke = k > at ? "var(--bad)" : "var(--w-hue)";
        lines[k].style.opacity = sees ? 1 : 0;
        lines[k].style.transition = "opacity .4s";
      });
      const rows = words.map((_, q) => words.map((_, k) => (!masked.checked || k <= q ? (k > q ? "leak" : "seen") : "hid")));
      Lesson.replace(picture, Lesson.grid(rows, Lesson.t("m.mask"), 210));
      const side = 210 / n;
      picture.firstChild.append(el("rect", { x: -0.5, y: at * side - 0.5, width: 210, height: side, fill: "none", "stroke-width": 2.5, rx: 2, style: "stroke: var(--ink)" }));
      const key = at === n - 1 ? "why.says.end" : masked.checked ? "why.says.on" : "why.says.off";
      find("arcs", ".says").textContent = t(key, { word: words[at], n: visible, all: n, next: words[at + 1] });
      const mask = masked.checked ? "causal" : "full";
      Lesson.python("arcs", `import lowtri\n\nwords = [${words.map((word) => JSON.stringify(word)).join(", ")}]\n` +
        `print(lowtri.${mask}().draw(${n}, tokens=words, ticks=True))`);
    }
    masked.addEventListener("change", draw);
    addEventListener("resize", draw);
    draw();
  }

  function plot(width, height, label) {
    return el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, width: "100%" });
  }

  function exponential() {
    const matrix = new Lesson.Matrix({ name: "added", kind: "m", title: t("matrix.added"), labelRows: true, labelColumns: true });
    find("exponential", ".additive").append(matrix.node);
    const words = Lesson.data.sentences.cat.slice(0, 4);
    const every = words.map((_, i) => i);
    const table = Lesson.table(Lesson.mask("causal"), words.length);
    matrix.show({ values: table, rows: every, columns: every, rowLabels: words, columnLabels: words,
      text: (x) => (x ? "0" : "−∞"), state: (i, j) => (table[i][j] ? "" : "hidden") });
    const svg = plot(360, 210, t("matrix.title"));
    const x = (s) => 30 + ((s + 10) / 12) * 320;
    const y = (e) => 180 - (e / 7.5) * 165;
    const points = Array.from({ length: 121 }, (_, i) => -10 + i / 10);
    const dot = el("circle", { r: 7, style: "fill: var(--w-hue)" });
    const drop = el("line", { style: "stroke: var(--w-hue)", "stroke-dasharray": "3 4" });
    svg.append(
      el("line", { class: "axis", x1: 20, x2: 352, y1: 180, y2: 180 }),
      ...[-10, -5, 0, 2].map((s) => el("text", { class: "faint", x: x(s), y: 200, "text-anchor": "middle", "font-size": 13 }, Lesson.number(s, 0))),
      el("text", { x: 236, y: 40, "font-size": 15, "text-anchor": "end" }, "exp(s)"),
      el("polyline", { points: points.map((s) => `${x(s)},${y(Math.exp(s))}`).join(" "), fill: "none", "stroke-width": 2.5, style: "stroke: var(--ink)" }),
      drop, dot);
    find("exponential", ".plot").append(svg);
    const slider = document.getElementById("score");
    const draw = () => {
      const p = Number(slider.value);
      const s = p === 0 ? -Infinity : -10 + (p / 100) * 12;
      const e = Math.exp(s);
      dot.setAttribute("cx", x(Math.max(s, -10)));
      dot.setAttribute("cy", y(e));
      for (const [name, value] of [["x1", x(Math.max(s, -10))], ["x2", x(Math.max(s, -10))], ["y1", y(e)], ["y2", 180]]) drop.setAttribute(name, value);
      const shown = Lesson.number(s, 1);
      slider.setAttribute("aria-valuetext", shown);
      find("exponential", ".says").textContent = t("matrix.says", { s: shown, e: s === -Infinity ? "0" : Lesson.number(e, 5), w: s === -Infinity ? "0" : Lesson.number(e / (1 + e), 5) });
    };
    slider.addEventListener("input", draw);
    draw();
  }

  function pair() {
    const { tokens, full, causal } = Lesson.data.pair;
    const every = tokens.map((_, i) => i);
    const says = find("encoder-decoder", ".says");
    const matrices = ["encoder", "decoder"].map((name) => new Lesson.Matrix({
      name, kind: "w", title: t(`pair.${name}`), labelRows: true, labelColumns: true, onpick: (_, i, j) => point(i, j) }));
    function point(i, j) {
      for (const matrix of matrices) matrix.mark("self", (a, b) => a === i && b === j);
      const values = { q: tokens[i], k: tokens[j], a: Lesson.number(full[i][j], 4), b: Lesson.number(causal[i][j], 4) };
      says.textContent = t(j > i ? "pair.says.hidden" : "pair.says", values);
    }
    [full, causal].forEach((values, n) => {
      find("encoder-decoder", `[data-place=${n ? "decoder" : "encoder"}]`).append(matrices[n].node);
      matrices[n].show({ values, rows: every, columns: every, rowLabels: tokens, columnLabels: tokens, shade: (x) => x,
        text: (x, i, j) => (n && j > i ? "0" : Lesson.number(x)), state: (i, j) => (n && j > i ? "hidden" : "") });
    });
    point(1, 0);
  }

  function forcing() {
    const words = Lesson.data.sentences.forcing;
    const inputs = words.slice(0, -1);
    const every = inputs.map((_, i) => i);
    const make = (place, title) => {
      const matrix = new Lesson.Matrix({ name: place, kind: "w", title, labelRows: true, labelColumns: true });
      find("forcing-figure", `[data-place=${place}]`).append(matrix.node);
      return matrix;
    };
    const all = make("training", t("forcing.left"));
    const one = make("inference", t("forcing.right", { n: inputs.length }));
    const show = (matrix, done) => {
      matrix.show({ values: every.map(() => every), rows: every, columns: every, rowLabels: inputs, columnLabels: inputs,
        text: (_, i, j) => (j > i ? "" : "✓"), state: (i, j) => (j > i ? "hidden" : ""), shade: () => 0.5,
        note: (_, i, j) => t(j > i ? "word.hidden" : "word.visible") });
      matrix.mark("todo", (i, j) => !done(i, j));
    };
    walked("forcing-figure", () => inputs.length, (at) => {
      show(all, () => true);
      show(one, (i, j) => i <= at && j <= i);
      find("forcing-figure", ".says").textContent = t("forcing.says", { i: at + 1, seen: words.slice(0, at + 1).join(" "), next: words[at + 1] });
    }, 1);
  }

  function generators() {
    const words = Lesson.data.sentences.nlp;
    const size = 64;
    const box = find("generators", ".three");
    const panels = ["rnn", "lstm", "attention"].map((name) => {
      const svg = plot(300, 150, t(`recurrent.${name}`));
      const says = el("p", { class: "hint" });
      box.append(el("div", { class: "rnn" }, el("h3", {}, t(`recurrent.${name}`)), svg, says));
      return { name, svg, says };
    });
    walked("generators", () => words.length - 1, (at) => {
      for (const { name, svg, says } of panels) {
        const x = (i) => 40 + i * (220 / (words.length - 2));
        const nodes = [];
        for (let i = 0; i <= at; i++) {
          const last = i === at;
          if (name === "attention") {
            nodes.push(el("rect", { x: x(i) - 15, y: 88, width: 30, height: 18, rx: 4, style: "fill: color-mix(in srgb, var(--k-hue) 30%, var(--card)); stroke: var(--k-hue)" }));
            nodes.push(el("path", { d: i === at ? `M${x(at)} 52V86` : `M${x(at)} 52 C${x(at)} 80 ${x(i)} 62 ${x(i)} 86`, fill: "none", style: "stroke: var(--w-hue)", "stroke-width": 2 }));
          } else {
            if (i) nodes.push(el("path", { d: `M${x(i - 1) + 15} 66H${x(i) - 17}`, style: "stroke: var(--w-hue)", "stroke-width": 2.5 }));
            if (i && name === "lstm") nodes.push(el("path", { d: `M${x(i - 1) + 15} 96H${x(i) - 17}`, style: "stroke: var(--v-hue)", "stroke-width": 4 }));
            nodes.push(el("circle", { cx: x(i), cy: 66, r: 13, style: `stroke: var(--w-hue); fill: ${last ? "color-mix(in srgb, var(--w-hue) 40%, var(--card))" : "var(--card)"}`, opacity: last ? 1 : 0.35 }));
            if (name === "lstm") nodes.push(el("rect", { x: x(i) - 13, y: 84, width: 26, height: 22, rx: 4, style: `stroke: var(--v-hue); fill: ${last ? "color-mix(in srgb, var(--v-hue) 40%, var(--card))" : "var(--card)"}`, opacity: last ? 1 : 0.35 }));
          }
          if (name === "attention" && last) nodes.push(el("circle", { cx: x(i), cy: 46, r: 10, style: "stroke: var(--q-hue); fill: color-mix(in srgb, var(--q-hue) 40%, var(--card))" }));
          nodes.push(el("text", { x: x(i), y: 136, "text-anchor": "middle", "font-size": 13 }, words[i]));
        }
        nodes.push(el("text", { x: x(at), y: 22, "text-anchor": "middle", "font-size": 14, "font-weight": 700 }, words[at + 1]));
        Lesson.replace(svg, nodes);
        const count = { rnn: size, lstm: 2 * size, attention: 2 * size * (at + 1) }[name];
        says.textContent = t(`recurrent.${name}.p`, { n: count, t: at + 1 });
      }
      find("generators", ".says").textContent = t("recurrent.says", { i: at + 1, seen: words.slice(0, at + 1).join(" "), next: words[at + 1] });
    }, words.length - 2);
  }

  /** A table of states as a drawing, one path for each state; in large tables equal neighbours of a row are one rectangle. */
  Lesson.grid = (rows, label, size = 160) => {
    const cell = size / rows.length;
    const svg = el("svg", { class: "grid", viewBox: `-1 -1 ${size + 2} ${size + 2}`, role: "img", "aria-label": label });
    const gap = cell > 6 ? 1 : 0;
    const paths = {};
    rows.forEach((row, i) => {
      for (let j = 0; j < row.length;) {
        let to = j + 1;
        while (!gap && to < row.length && row[to] === row[j]) to++;
        const width = ((to - j) * cell - gap).toFixed(2);
        paths[row[j]] = `${paths[row[j]] ?? ""}M${(j * cell).toFixed(2)} ${(i * cell).toFixed(2)}h${width}v${(cell - gap).toFixed(2)}h-${width}z`;
        j = to;
      }
    });
    svg.append(...Object.entries(paths).map(([state, d]) => el("path", { class: state, d })));
    return svg;
  };

  /** For each of n keys the last query that sees it, among the first 2 n positions: a cache holds it until then. */
  const lastSeen = (sees, n) => Array.from({ length: n }, (_, k) => {
    let q = 2 * n - 1;
    while (q > k && !sees(q, k)) q--;
    return q;
  });

  function cache() {
    const select = find("cache-figure", "select");
    const masks = ["causal", "causal & window(3)", "causal & (window(2) | first(1))"];
    select.append(...masks.map((text) => el("option", { value: text }, text)));
    const words = Lesson.data.sentences.long.slice(0, 7);
    const rows = find("cache-figure", ".rows");
    const again = walked("cache-figure", () => words.length, (at) => {
      const sees = Lesson.mask(select.value);
      const last = lastSeen(sees, 64);
      const kept = words.map((_, k) => k).filter((k) => k <= at && last[k] >= at);
      const line = el("div", { class: "cacherow" }, el("b", {}, t("cache.step", { i: at + 1 })));
      words.forEach((word, k) => {
        const state = k > at ? "later" : kept.includes(k) ? "" : "gone";
        line.append(el("span", { class: state, title: state === "gone" ? t("cache.gone") : null }, el("bdi", {}, word)));
      });
      const query = el("div", { class: "cacherow" }, el("b", {}, t("word.query")), el("span", { class: "query" }, el("bdi", {}, words[at])));
      Lesson.replace(rows, line, query);
      const seen = words.filter((_, k) => k <= at && sees(at, k)).length;
      find("cache-figure", ".says").textContent = t("cache.says", { i: at + 1, seen, held: kept.length });
      Lesson.python("cache", `import numpy as np\nimport lowtri\n\nq, k, v = np.random.default_rng(0).standard_normal((3, 8, 64, 16))\n` +
        `cache = lowtri.KVCache("${select.value}")\nfor t in range(64):\n    cache.attend(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1])\nprint(cache)`);
    }, 4);
    select.addEventListener("change", again);
  }

  function patterns() {
    const [sizeN, sizeW] = [document.getElementById("patterns-n"), document.getElementById("patterns-w")];
    const gallery = find("patterns-figure", ".gallery");
    const names = ["causal", "window", "sinks", "documents", "prefix"];
    const parts = names.map((name) => {
      const [picture, code, count] = [el("div"), el("code"), el("p")];
      gallery.append(el("article", {}, el("h3", {}, t(`patterns.${name}`)), picture, el("p", {}, code), el("p", {}, t(`patterns.${name}.p`)), count));
      return { name, picture, code, count };
    });
    const draw = () => {
      const [n, w] = [Number(sizeN.value), Number(sizeW.value)];
      find("patterns-figure", "[data-note=n]").textContent = n;
      find("patterns-figure", "[data-note=w]").textContent = w;
      const texts = { causal: "causal", window: `causal & window(${w})`, sinks: `causal & (window(${w}) | first(2))`,
        documents: `causal & documents(lengths=[${Math.min(w, n - 1)}, ${n - Math.min(w, n - 1)}])`, prefix: `causal | first(${w})` };
      for (const { name, picture, code, count } of parts) {
        const sees = Lesson.mask(texts[name]);
        const table = Lesson.table(sees, n);
        const pairs = table.flat().filter(Boolean).length;
        const last = lastSeen(sees, n);
        const most = Math.max(...last.map((_, at) => last.filter((q, k) => k <= at && q >= at).length));
        code.textContent = texts[name];
        Lesson.replace(picture, Lesson.grid(table.map((row) => row.map((x) => (x ? "seen" : "hid"))), texts[name]));
        count.textContent = t("patterns.count", { pairs, all: n * n, held: most });
      }
      Lesson.python("patterns", `import lowtri\n\nmask = lowtri.mask("${texts.sinks}")\nprint(mask.draw(${n}))\nprint(mask.pairs(${n}, ${n}))`);
    };
    sizeN.addEventListener("input", draw);
    sizeW.addEventListener("input", draw);
    draw();
  }

  Lesson.figures = [arcs, exponential, pair, forcing, generators, cache, patterns];
})();
