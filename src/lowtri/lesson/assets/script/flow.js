"use strict";
// The way from the words to the next token as one picture that opens into the steps; and the shapes of batches and heads.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;
  const find = (id, selector) => document.querySelector(`#${id} ${selector}`);
  const [WIDTH, HEADS, VOCABULARY] = [512, 8, 50257];
  const SIZE = WIDTH / HEADS;

  const walkTo = (frame) => () => {
    document.getElementById("bench").scrollIntoView();
    Lesson.walk.go(frame);
  };
  const toMaps = () => {
    const box = document.querySelector("#bench .made");
    box.open = true;
    box.scrollIntoView();
  };
  const toLive = () => document.getElementById("live").scrollIntoView();

  // name, hue, the shape of its numbers for T tokens, and where the page shows it
  const STAGES = [
    ["words", "", (T) => `(${T},)`, null],
    ["embedding", "", (T) => `(${T}, ${WIDTH})`, toMaps],
    ["qkv", "", (T) => `3 × (${T}, ${WIDTH})`, toMaps],
    ["heads", "q", (T) => `3 × (${HEADS}, ${T}, ${SIZE})`, null],
    ["scores", "k", (T) => `(${HEADS}, ${T}, ${T})`, walkTo(0)],
    ["mask", "", (T) => `(1, ${T}, ${T})`, walkTo(3)],
    ["softmax", "w", (T) => `(${HEADS}, ${T}, ${T})`, walkTo(6)],
    ["values", "v", (T) => `(${HEADS}, ${T}, ${SIZE})`, walkTo(9)],
    ["join", "", (T) => `(${T}, ${WIDTH})`, null],
    ["next", "", (T) => `(${T}, ${VOCABULARY})`, toLive],
  ];

  function flow() {
    const list = find("flow-figure", ".stages");
    const says = find("flow-figure", ".says");
    const tokens = Lesson.data.sentences.example;
    const open = find("flow-figure", "[data-action=open]");
    const shape = find("flow-figure", ".shape");
    let action = null;
    open.addEventListener("click", () => action());
    const buttons = STAGES.map(([name, hue, shapeOf, goes]) => {
      const button = el("button", { type: "button", class: hue, "data-stage": name, "aria-pressed": false, onclick: () => {
        for (const other of buttons) other.setAttribute("aria-pressed", other === button);
        says.textContent = plain(t(`flow.${name}.p`));
        shape.textContent = name === "words" ? `${tokens.join(" · ")} ${shapeOf(tokens.length)}` : shapeOf(tokens.length);
        action = goes;
        open.hidden = !goes;
      } }, t(`flow.${name}`));
      return button;
    });
    list.append(...buttons.map((button) => el("li", {}, button)));
    buttons[4].click();
  }

  /** A text without its markup. */
  const plain = (text) => text.replace(/\[[qkvw]:([^\]]+)\]/g, "$1").replace(/[*`]/g, "");

  function shapes() {
    const names = ["b", "h", "t", "d"];
    const sliders = names.map((name) => document.getElementById(`shapes-${name}`));
    const box = find("shapes-figure", ".stacks");
    const draw = () => {
      const [B, H, T, d] = sliders.map((slider) => Number(slider.value));
      names.forEach((name, n) => { find("shapes-figure", `[data-note=${name}]`).textContent = sliders[n].value; });
      const stack = (title, shape, kind, columns, rows, heads, state) => {
        const parts = [];
        for (let b = 0; b < rows; b++) for (let h = 0; h < heads; h++) parts.push(matrix(T, columns, kind, state));
        const sizes = `(${shape.join(", ")})`;
        return el("div", { class: "stack" }, el("h3", {}, title), el("code", {}, sizes),
          el("div", { class: "tiles", role: "img", "aria-label": `${title} ${sizes}`, style: { "--heads": heads } }, parts));
      };
      const triangle = (i, j) => (j > i ? "hid" : "seen");
      Lesson.replace(box,
        stack("Q, K, V", [B, H, T, d], "q", d, B, H, () => "cell"),
        stack(t("shapes.scores"), [B, H, T, T], "s", T, B, H, () => "cell"),
        stack(t("shapes.mask"), [1, 1, T, T], "m", T, 1, 1, triangle),
        stack(t("shapes.weights"), [B, H, T, T], "w", T, B, H, triangle),
        stack(t("shapes.output"), [B, H, T, d], "v", d, B, H, () => "cell"));
      find("shapes-figure", ".says").textContent = t("shapes.says", { t: T, n: B * H });
      Lesson.python("shapes", "import numpy as np\nfrom lowtri.plain import make_causal_mask, masked_self_attention\n\n" +
        `Q, K, V = np.random.default_rng(0).standard_normal((3, ${B}, ${H}, ${T}, ${d}))\n` +
        `mask = make_causal_mask(${T})[None, None]\noutput, weights = masked_self_attention(Q, K, V, mask)\n` +
        "print(mask.shape, weights.shape, output.shape)");
    };
    for (const slider of sliders) slider.addEventListener("input", draw);
    draw();
  }

  const PIXELS = 9;

  /** A small matrix: T rows, `columns` columns. */
  function matrix(T, columns, kind, state) {
    const paths = {};
    for (let i = 0; i < T; i++) {
      for (let j = 0; j < columns; j++) {
        const name = state(i, j);
        paths[name] = `${paths[name] ?? ""}M${j * PIXELS} ${i * PIXELS}h${PIXELS - 1}v${PIXELS - 1}h-${PIXELS - 1}z`;
      }
    }
    const size = { width: columns * PIXELS, height: T * PIXELS };
    return el("svg", { class: `tile ${kind}`, ...size, viewBox: `0 0 ${size.width} ${size.height}`, "aria-hidden": "true" },
      ...Object.entries(paths).map(([name, d]) => el("path", { class: name, d })));
  }

  Lesson.figures.push(flow, shapes);
})();
