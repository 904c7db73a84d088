"use strict";
// Two traps that answer the hand, and the quiz.

(() => {
  const Lesson = globalThis.Lesson;
  const { el, t } = Lesson;

  /** The weight that a hidden key keeps when `x` stands for "hidden": beside a visible score of 0 with another score of 0. */
  function half() {
    const numbers = [-1, -5, -10, -20, -1e4, -1e9, -Infinity];
    const slider = document.getElementById("half-score");
    const says = document.querySelector(".half .says");
    const draw = () => {
      const x = numbers[Number(slider.value)];
      const w = Math.exp(x) / (1 + Math.exp(x));
      const name = x === -1e9 ? "−1e9" : Lesson.number(x, 0);
      slider.setAttribute("aria-valuetext", name);
      const shown = w === 0 ? "0" : w < 1e-4 ? Lesson.exponential(w, 1) : Lesson.number(w, 4);
      const w16 = w < 2 ** -25 ? "0" : shown; // the least number above 0 in float16 is 2**-24
      const inHalf = x < -65504 && x !== -Infinity ? t("traps.3.half.out") : t("traps.3.half.ok", { w16 });
      says.textContent = t("traps.3.says", { x: name, w32: shown, half: inHalf });
    };
    slider.addEventListener("input", draw);
    draw();
  }

  // Each round: four programs, and which of them peeks.
  const ROUNDS = [
    [1, ["scores = q @ k.mT / d**0.5\nscores += torch.full((n, n), -inf).triu(1)\nw = scores.softmax(-1)",
      "seen = torch.ones(n, n).triu() == 1\nw = scores.masked_fill(~seen, -inf)\nw = w.softmax(-1)",
      "seen = torch.ones(n, n).tril() == 1\nw = scores.masked_fill(~seen, -inf)\nw = w.softmax(-1)",
      "o = scaled_dot_product_attention(\n    q, k, v, is_causal=True)"]],
    [0, ["w = scores.softmax(-1).tril()\no = w @ v",
      "hidden = torch.ones(n, n).triu(1) == 1\nw = scores.masked_fill(hidden, -1e9)\nw = w.softmax(-1)",
      "o = lowtri.attention(q, k, v,\n    \"causal & window(4)\")",
      "o = lowtri.attention(q, k, v,\n    \"causal | first(16)\")"]],
    [1, ["# q: the newest token\no = scaled_dot_product_attention(\n    q, cache.keys, cache.values)",
      "x = x - x.mean(1, keepdim=True)\nx = causal_attention(x)",
      "x = nn.LayerNorm(d)(x)\nx = causal_attention(x)",
      "x = F.pad(x, (2, 0))\nx = F.conv1d(x, w3)"]],
  ];

  function quiz() {
    const box = document.querySelector(".quiz");
    let right = 0; // rounds whose first answer was right
    ROUNDS.forEach(([peeks, programs], round) => {
      let done = false;
      const says = el("p", { class: "says", "aria-live": "polite" });
      const group = el("fieldset", { class: "choices" }, el("legend", { class: "sr" }, `${t("quiz.title")} ${round + 1}`));
      const items = programs.map((program, n) => {
        const why = el("p");
        const button = el("button", { type: "button", onclick: () => {
          if (!done) {
            done = true;
            right += n === peeks;
          }
          says.textContent = `${t(n === peeks ? "quiz.right" : "quiz.wrong")} ${t("quiz.score", { right, all: ROUNDS.length })}`;
          items.forEach(([other, text], m) => {
            other.classList.add(m === peeks ? "right" : m === n ? "wrong" : "shown");
            text.textContent = t(`quiz.${round + 1}.${"abcd"[m]}`);
          });
        } }, el("code", {}, program));
        group.append(el("div", {}, button, why));
        return [button, why];
      });
      box.append(el("h3", {}, `${round + 1}`), group, says);
    });
    box.append(el("p", {}, t("quiz.end")), ...[1, 2, 3].map((n) =>
      el("details", {}, el("summary", {}, t(`quiz.q${n}`)), el("p", {}, t(`quiz.a${n}`)))));
  }

  Lesson.figures.push(half, quiz);
})();
