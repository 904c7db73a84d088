"use strict";
// The namespace of the page's scripts, its data, its texts, and the few helpers that all of them use.
// Each file adds to `Lesson`; none needs a browser before `Lesson.start()` runs, so that tests can load them in Node.

globalThis.Lesson = {};

(() => {
  const Lesson = globalThis.Lesson;
  Lesson.data = {};

  /** A text of the page's language, with {name} filled in. */
  Lesson.t = (key, values = {}) => {
    const text = (Lesson.data.texts || {})[key];
    if (text === undefined) return key;
    return text.replace(/\{(\w+)\}/g, (all, name) => (name in values ? String(values[name]) : all));
  };

  /** An element: tag, attributes (`class`, `on...` as functions), children (elements or texts; never HTML). */
  Lesson.el = (tag, attributes = {}, ...children) => {
    const svg = ["svg", "path", "rect", "circle", "line", "text", "g", "polyline", "title"].includes(tag);
    const node = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
      else if (name === "style" && typeof value === "object") {
        for (const [property, x] of Object.entries(value)) node.style.setProperty(property, x);
      } else node.setAttribute(name, value === true ? "" : value);
    }
    node.append(...children.flat().filter((child) => child !== null && child !== undefined));
    return node;
  };

  Lesson.replace = (node, ...children) => node.replaceChildren(...children.flat());

  /** A number with a true minus sign; "−∞" for what the mask hides. */
  Lesson.number = (x, digits = 2) => {
    if (x === -Infinity) return "−∞";
    const text = x.toFixed(digits);
    return written(Number(text) === 0 ? text.replace("-", "") : text);
  };

  /** The digits of a number with a true minus sign and the decimal sign of the language. */
  const written = (digits) => digits.replace("-", "−").replace(".", Lesson.data.decimal ?? ".");

  /** A number as 4.5e−5. */
  Lesson.exponential = (x, digits) => written(x.toExponential(digits));

  /** Characters that are invisible or reverse the reading order are written as escapes. */
  Lesson.spelled = (text) =>
    text.replace(/[\p{Cc}\p{Zl}\p{Zp}\u202a-\u202e\u2066-\u2069\u200b-\u200c\u200e\u200f\ufeff]/gu, (c) =>
      "\\u" + c.codePointAt(0).toString(16).padStart(4, "0"));

  Lesson.shortened = (text, most = 12) => {
    const shown = [...Lesson.spelled(text)];
    return shown.length > most ? shown.slice(0, most - 1).join("") + "…" : shown.join("");
  };

  /** Whether motion is wanted: the reader's system and the page's own switch both may say no. */
  Lesson.moves = () =>
    !document.documentElement.hasAttribute("data-still") &&
    !matchMedia("(prefers-reduced-motion: reduce)").matches;

  /** Shows the line of Python of a figure; its copy button reads the text at the moment of the click. */
  Lesson.python = (id, code) => {
    const box = document.querySelector(`[data-python="${id}"] code`);
    if (box && box.textContent !== code) box.textContent = code;
  };
})();
