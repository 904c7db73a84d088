"use strict";
// The equation of one cell, with its numbers in the hues of the matrices that they come from; and the cells that they come from.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;
  const MOST_TERMS = 5;

  const hue = (kind, text) => el("span", { class: `n ${kind}` }, text);
  const n4 = (x) => Lesson.number(x, 4);
  const sub = (name, ...indices) => [el("i", {}, name), el("sub", {}, indices.map((i) => i + 1).join(","))];

  const power = (s) => [el("i", {}, "e"), el("sup", {}, n4(s))];

  /** a1 × b1 + a2 × b2 + ... */
  function sum(kindA, a, kindB, b) {
    const terms = a.map((x, i) => [x, b[i]]).filter(([x]) => x !== 0 || a.length <= MOST_TERMS);
    const shown = terms.slice(0, MOST_TERMS).flatMap(([x, y], i) =>
      [i ? " + " : "", hue(kindA, n4(x)), " × ", hue(kindB, n4(y))]);
    return terms.length > MOST_TERMS ? [...shown, " + …"] : shown.length ? shown : ["0"];
  }

  const column = (m, j) => m.map((row) => row[j]);

  /** The equation of cell (i, j) of a matrix of the steps, as nodes. */
  Lesson.equation = (name, i, j, state) => {
    const { steps, x, maps, visible } = state;
    if (name === "x") return [...sub("x", i, j), " = ", n4(x[i][j])];
    if (name === "mask") {
      return [t(visible[i][j] ? "equation.sees" : "equation.hides", { q: i + 1, k: j + 1 })];
    }
    if (name === "q" || name === "k" || name === "v") {
      const value = state[name][i][j];
      const edited = state.edited && name !== "v";
      const line = [hue(name, [...sub(name, i, j)].map((n) => n.textContent).join("")), " = "];
      return edited || !maps
        ? [...line, hue(name, n4(value))]
        : [...line, ...sum("x", x[i], name, column(maps[name], j)), " = ", hue(name, n4(value))];
    }
    if (name === "W_q" || name === "W_k" || name === "W_v") {
      return [el("i", {}, "W"), el("sub", {}, name[2]), " ", n4(maps[name[2]][i][j])];
    }
    if (name === "scaled") {
      return [...sub("s", i, j), " = ", hue("q", `q${i + 1}`), " · ", hue("k", `k${j + 1}`), " / √2 = (",
        ...sum("q", state.q[i], "k", state.k[j]), ") / 1.4142 = ", el("b", {}, n4(steps.scaled[i][j]))];
    }
    if (name === "masked") {
      return visible[i][j]
        ? [...sub("s", i, j), " + 0 = ", el("b", {}, n4(steps.scaled[i][j]))]
        : [...sub("s", i, j), " + (−∞) = ", el("b", {}, "−∞"), ". ", t("equation.hides", { q: i + 1, k: j + 1 })];
    }
    if (name === "weights") {
      const row = steps.masked[i];
      const open = row.filter((s) => s !== -Infinity);
      if (!open.length) return [t("equation.nothing", { q: i + 1 })];
      const terms = open.slice(0, MOST_TERMS).flatMap((s, at) => [at ? " + " : "", ...power(s)]);
      return [...sub("a", i, j), " = ", ...power(row[j]), " / (", ...terms, open.length > MOST_TERMS ? " + …" : "", ") = ",
        hue("w", n4(steps.weights[i][j]))];
    }
    return [...sub("o", i, j), " = ", ...sum("w", steps.weights[i], "v", column(state.v, j)), " = ",
      hue("v", n4(steps.output[i][j]))];
  };

  /** For a cell: for each matrix that it comes from, which of its cells. The transposed keys are (column, key). */
  Lesson.sources = (name, i, j) => ({
    q: { x: (a) => a === i, W_q: (_, b) => b === j },
    k: { x: (a) => a === j, W_k: (_, b) => b === i },
    v: { x: (a) => a === i, W_v: (_, b) => b === j },
    scaled: { q: (a) => a === i, k: (_, b) => b === j },
    mask: {},
    masked: { scaled: (a, b) => a === i && b === j, mask: (a, b) => a === i && b === j },
    weights: { masked: (a) => a === i },
    output: { weights: (a) => a === i, v: (_, b) => b === j },
  })[name] ?? {};
})();
