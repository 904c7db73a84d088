"use strict";
// Starts the page: reads its data, draws every figure, and serves the bar on top and the copy buttons.

(() => {
  const Lesson = globalThis.Lesson;
  const { t } = Lesson;

  function buttons() {
    const root = document.documentElement;
    document.getElementById("theme").addEventListener("click", () => {
      const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
      root.dataset.theme = dark ? "light" : "dark";
      Lesson.ready.then(() => {
        Lesson.repaint();
        Lesson.bench.paint();
        Lesson.address.write();
      });
    });
    const motion = document.getElementById("motion");
    const says = () => { // where the system asks for stillness, the page cannot overrule it, and says so
      const asked = matchMedia("(prefers-reduced-motion: reduce)").matches;
      motion.disabled = asked;
      motion.setAttribute("aria-pressed", Lesson.moves());
      motion.title = t(asked ? "nav.motion.system" : Lesson.moves() ? "nav.motion" : "nav.motion.off");
      motion.querySelector(".sr").textContent = motion.title;
    };
    motion.addEventListener("click", () => {
      root.toggleAttribute("data-still");
      says();
    });
    matchMedia("(prefers-reduced-motion: reduce)").addEventListener("change", says);
    says();
    document.addEventListener("click", async (event) => {
      const button = event.target.closest("[data-copy]");
      if (!button) return;
      const code = button.closest(".python").querySelector("code");
      try {
        await navigator.clipboard.writeText(code.textContent);
      } catch { // a page opened from a file may not have the clipboard: the text is selected instead
        getSelection().selectAllChildren(code);
        document.execCommand("copy");
      }
      button.textContent = t("copied");
      setTimeout(() => { button.textContent = t("copy"); }, 1500);
    });
  }

  /** Marks the section in view in the list of sections. */
  function contents() {
    const links = new Map([...document.querySelectorAll(".contents a")].map((a) => [a.hash.slice(1), a]));
    const seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        if (!entry.isIntersecting) continue;
        Lesson.address.at(entry.target.id);
        for (const [id, a] of links) {
          if (id === entry.target.id) a.setAttribute("aria-current", "true");
          else a.removeAttribute("aria-current");
        }
      }
    }, { rootMargin: "-15% 0px -75% 0px" });
    document.querySelectorAll("main > section").forEach((section) => seen.observe(section));
    const list = document.querySelector(".contents details");
    list.open = matchMedia("(min-width: 70rem)").matches;
  }

  /** On narrow screens each row of a comparison becomes a card; its cells then need the names of their columns. */
  function tables() {
    for (const table of document.querySelectorAll(".compare")) {
      const names = [...table.querySelectorAll("thead th")].map((th) => th.textContent);
      for (const row of table.querySelectorAll("tbody tr")) {
        [...row.querySelectorAll("td")].forEach((td, n) => { td.dataset.name = names[n]; });
      }
    }
  }

  Lesson.start = () => {
    Lesson.data = JSON.parse(document.getElementById("lesson-data").textContent);
    Lesson.address.theme();
    buttons();
    tables();
    const bench = () => {
      Lesson.bench = new Lesson.Workbench(document.getElementById("bench"));
      Lesson.walk = new Lesson.Walk(Lesson.bench);
      Lesson.address.read();
      Lesson.bench.onchange = Lesson.address.later;
    };
    // One figure a task, after the text has been painted (a tab in the background does not paint): the page answers in between.
    const painted = new Promise((done) => { requestAnimationFrame(() => setTimeout(done)); setTimeout(done, 500); });
    const task = (figure) => new Promise((done) => { setTimeout(() => { figure(); done(); }); });
    const [first, ...others] = Lesson.figures;
    Lesson.ready = [first, bench, ...others].reduce((before, figure) => before.then(() => task(figure)), painted).then(() => {
      const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
      if (target) target.scrollIntoView(); // figures above it have grown since the browser went there
      contents();
      Lesson.address.write();
    });
  };

  if (typeof document !== "undefined") Lesson.start();
})();
