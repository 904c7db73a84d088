"use strict";
// The state of the page in its address: the sentence, the mask, the theme, and the section in view. What the reader left as it was
// is left out, so that a page in another language opens with its own sentence.

(() => {
  const Lesson = globalThis.Lesson;
  const MOST_DRAWN = 16; // tokens: a longer table drawn by hand would make a long address

  const bits = (table) => table.map((row) => row.map((x) => (x ? "1" : "0")).join("")).join("-");
  const table = (text) => text.split("-").map((row) => [...row].map((x) => x === "1"));

  function query() {
    const { bench } = Lesson;
    const { dataset } = document.documentElement;
    const values = new URLSearchParams();
    if (bench.sentence.value !== Lesson.data.sentences.start) values.set("sentence", bench.sentence.value);
    if (bench.drawn && bench.n <= MOST_DRAWN) values.set("drawn", bits(bench.drawn));
    else if (bench.lastGood.trim() !== "causal") values.set("mask", bench.lastGood.trim());
    if (!bench.maskSwitch.checked) values.set("switch", "off");
    if (dataset.theme) values.set("theme", dataset.theme);
    const text = values.toString();
    return text ? `?${text}` : "";
  }

  /** Writes the state into the address, and into the links to the other languages. */
  function write() {
    const rest = query() + (section ? `#${section}` : "");
    history.replaceState(null, "", location.pathname + rest);
    for (const link of document.querySelectorAll(".languages a")) link.setAttribute("href", link.dataset.file + rest);
  }

  let section = "";
  let waiting = 0;

  /** Soon, and once for many changes: browsers refuse an address that changes too often. */
  const later = () => {
    clearTimeout(waiting);
    waiting = setTimeout(write, 200);
  };

  Lesson.address = {
    write,
    later,
    at: (name) => {
      section = name;
      later();
    },
    /** The theme, before anything is drawn. */
    theme: () => {
      const theme = new URLSearchParams(location.search).get("theme");
      if (theme === "dark" || theme === "light") document.documentElement.dataset.theme = theme;
    },
    /** The state that the address names; what is not there stays as it is. */
    read: () => {
      const values = new URLSearchParams(location.search);
      const { bench } = Lesson;
      section = location.hash.slice(1);
      if (values.has("mask")) bench.maskText.value = values.get("mask");
      if (values.has("sentence")) bench.setSentence(values.get("sentence"));
      if (values.get("switch") === "off") bench.maskSwitch.checked = false;
      const drawn = table(values.get("drawn") ?? "");
      if (drawn.length === bench.n && drawn.every((row) => row.length === bench.n)) bench.draw(drawn);
      else bench.read();
    },
  };
})();
