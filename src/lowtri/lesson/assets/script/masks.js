"use strict";
// Masks from text: lowtri's own grammar. A mask is a function (q, k) -> whether the query at position q may see the key at k.
// `&`, `|`, `~` and `-` have Python's precedence: `-` binds tighter than `&`, and `&` tighter than `|`.

(() => {
  const Lesson = globalThis.Lesson;
  const STRENGTH = { "|": 1, "&": 2, "-": 3 };
  const MOST_DEPTH = 100;
  const TOKEN = /\s*(\d[\w.]*|[\p{L}_][\p{L}\p{N}_]*|'[^']*'|"[^"]*"|\S|$)/uy;

  class MaskError extends Error {
    constructor(key, values) {
      super(Lesson.t(key, values));
      this.key = key;
    }
  }

  class Mask {
    constructor(sees) { this.sees = sees; }
  }

  const JOINS = {
    "|": (a, b) => (q, k) => a(q, k) || b(q, k),
    "&": (a, b) => (q, k) => a(q, k) && b(q, k),
    "-": (a, b) => (q, k) => a(q, k) && !b(q, k),
  };

  const isCount = (x) => Number.isInteger(x);

  function count(name, n, least) {
    if (!isCount(n) || n < least) throw new MaskError("error.count", { name, n: shown(n), least });
    return n;
  }

  function list(name, values, check) {
    if (!Array.isArray(values) || !values.length || !values.every(check)) throw new MaskError("error.list", { name });
    return values;
  }

  /** The label of a position; beyond the array the last label continues. */
  const labelled = (labels) => (p) => labels[Math.min(p, labels.length - 1)];

  function documents(ids, keyIds, lengths, cuts, openEnd = false) {
    const given = [ids, lengths, cuts].filter((x) => x !== undefined);
    if (given.length !== 1 || typeof openEnd !== "boolean" || (openEnd && ids !== undefined)) throw new MaskError("error.list", { name: "documents" });
    let labels;
    if (ids !== undefined) labels = list("documents", ids, isCount);
    else {
      let sizes = lengths;
      if (cuts !== undefined) {
        list("documents", cuts, isCount);
        sizes = cuts.slice(1).map((cut, i) => cut - cuts[i]);
        if (cuts[0] !== 0) throw new MaskError("error.list", { name: "documents" });
      }
      list("documents", sizes, (n) => isCount(n) && n >= 1 && n <= 1e6);
      labels = sizes.flatMap((size, document) => Array(Math.min(size, 4096)).fill(document));
      if (!labels.length) throw new MaskError("error.list", { name: "documents" });
      labels.push(sizes.length - 1);
      labels.total = sizes.reduce((sum, size) => sum + size, 0);
    }
    const keys = keyIds === undefined ? labels : list("documents", keyIds, isCount);
    const [query, key] = [labelled(labels), labelled(keys)];
    const sees = (q, k) => query(q) === key(k);
    if (ids === undefined && !openEnd) sees.total = labels.total;
    return sees;
  }

  function keys(valid, lengths) {
    if ((valid === undefined) === (lengths === undefined)) throw new MaskError("error.list", { name: "keys" });
    if (lengths !== undefined) {
      list("keys", lengths, (n) => isCount(n) && n >= 0);
      if (lengths.length > 1) throw new MaskError("error.one", { name: "keys" });
      return (q, k) => k < lengths[0];
    }
    list("keys", valid, (x) => typeof x === "boolean");
    return (q, k) => k >= valid.length || valid[k];
  }

  // name -> the names of its parameters, and the function that makes it
  const MASKS = {
    causal: [[], () => (q, k) => k <= q],
    full: [[], () => () => true],
    window: [["n"], (n) => { count("window", n, 1); return (q, k) => q - n < k && k <= q; }],
    band: [["before", "after"], (before, after) => {
      count("band", before, 0);
      count("band", after, 0);
      return (q, k) => q - before <= k && k <= q + after;
    }],
    first: [["n"], (n) => { count("first", n, 1); return (q, k) => k < n; }],
    documents: [["ids", "key_ids", "lengths", "cu_seqlens", "open_end"], documents],
    chunks: [["n"], (n) => { count("chunks", n, 1); return (q, k) => Math.floor(q / n) === Math.floor(k / n); }],
    strided: [["n"], (n) => { count("strided", n, 1); return (q, k) => (q - k) % n === 0; }],
    keys: [["valid", "lengths"], keys],
    heads: [["masks"], () => { throw new MaskError("error.one", { name: "heads" }); }],
  };
  const OPTIONAL = ["documents", "keys"];
  const KEYWORD_ONLY = { documents: 2, keys: 1 }; // so many arguments may come without a name

  const shown = (x) => Lesson.shortened(Array.isArray(x) ? "[...]" : x instanceof Mask ? "mask" : String(x), 40);

  class Reader {
    constructor(text) {
      this.text = text;
      this.next = 0;
      this.totals = []; // of each set of documents with lengths: how many tokens they have together
      this.scan();
    }

    scan() {
      TOKEN.lastIndex = this.next;
      const match = TOKEN.exec(this.text);
      this.token = match ? match[1] : "";
      this.start = (match ? TOKEN.lastIndex : this.text.length) - this.token.length;
      this.next = match ? TOKEN.lastIndex : this.text.length;
    }

    take() {
      const token = this.token;
      this.scan();
      return token;
    }

    fail() {
      if (!this.token && !this.text.trim()) return new MaskError("error.empty", {});
      if (["and", "or", "not"].includes(this.token)) return new MaskError("error.words", {});
      return this.token
        ? new MaskError("error.syntax", { what: shown(this.text.slice(this.start)) })
        : new MaskError("error.end", {});
    }

    expect(sign) {
      if (this.token !== sign) throw this.fail();
      this.take();
    }

    /** A mask, a number, a bool or a list; signs that bind at least as strongly as `least` join masks. */
    value(depth, least = 1) {
      if (depth > MOST_DEPTH) throw new MaskError("error.deep", {});
      const start = this.start;
      let left = this.operand(depth);
      while ((STRENGTH[this.token] || 0) >= least) {
        const sign = this.take();
        const right = this.value(depth + 1, STRENGTH[sign] + 1);
        if (!(left instanceof Mask && right instanceof Mask)) {
          throw new MaskError("error.syntax", { what: shown(this.text.slice(start)) });
        }
        left = new Mask(JOINS[sign](left.sees, right.sees));
      }
      if (["and", "or"].includes(this.token)) throw this.fail();
      return left;
    }

    operand(depth) {
      if (this.token === "" || this.token === "not") throw this.fail();
      const start = this.start;
      const token = this.token;
      if (token === "~") {
        this.take();
        const inner = this.value(depth + 1, 4);
        if (!(inner instanceof Mask)) throw new MaskError("error.syntax", { what: shown(this.text.slice(start)) });
        return new Mask((q, k) => !inner.sees(q, k));
      }
      if (token === "-") {
        this.take();
        if (!/^\d/.test(this.token)) throw this.fail();
        return -this.number(this.take());
      }
      if (/^\d/.test(token)) return this.number(this.take());
      if (token === "(" || token === "[") {
        this.take();
        return this.entries(token, depth);
      }
      if (!/^[\p{L}_]/u.test(token)) throw this.fail();
      this.take();
      return this.named(token, depth);
    }

    number(token) {
      const digits = token.replace(/(?<=\w)_(?=\w)/g, "");
      if (token.length > 40 || !/^(0[xX][0-9a-fA-F]+|0[bB][01]+|0[oO][0-7]+|0+|[1-9]\d*)$/.test(digits)) {
        throw new MaskError("error.number", { what: shown(token) });
      }
      return Number(digits);
    }

    entries(bracket, depth) {
      const closing = bracket === "(" ? ")" : "]";
      const values = [];
      let comma = false;
      while (this.token !== closing) {
        values.push(this.value(depth + 1));
        comma = this.token === ",";
        if (!comma) break;
        this.take();
      }
      this.expect(closing);
      return bracket === "(" && values.length === 1 && !comma ? values[0] : values;
    }

    named(name, depth) {
      if (name === "True" || name === "False") return name === "True";
      if (name === "None") return undefined;
      if (!Object.hasOwn(MASKS, name)) {
        if (["table", "hidden", "where"].includes(name)) throw new MaskError("error.array", { name });
        throw new MaskError("error.unknown", { name: shown(name), names: Object.keys(MASKS).join(", ") });
      }
      const [parameters, make] = MASKS[name];
      const values = this.token === "(" ? this.arguments(name, parameters, depth) : [];
      const missing = parameters.findIndex((_, i) => values[i] === undefined);
      if (!OPTIONAL.includes(name) && missing >= 0) {
        throw new MaskError("error.arguments", { call: `${name}(${parameters.join(", ")})` });
      }
      const sees = make(...values);
      if (sees.total !== undefined) this.totals.push(sees.total);
      return new Mask(sees);
    }

    arguments(name, parameters, depth) {
      const values = Array(parameters.length).fill(undefined);
      const wrong = () => new MaskError("error.arguments", { call: `${name}(${parameters.join(", ")})` });
      let place = 0;
      this.take();
      while (this.token !== ")") {
        if (/^\p{L}/u.test(this.token) && /^\s*=/.test(this.text.slice(this.next))) {
          const at = parameters.indexOf(this.take());
          this.take();
          if (at < 0 || values[at] !== undefined) throw wrong();
          values[at] = this.value(depth + 1);
        } else {
          if (place >= (KEYWORD_ONLY[name] ?? parameters.length)) throw wrong();
          values[place++] = this.value(depth + 1);
        }
        if (this.token !== ",") break;
        this.take();
      }
      this.expect(")");
      return values;
    }
  }

  /**
   * The mask of a text, as a function (q, k) -> bool. Throws a MaskError in the page's language; for a sentence of `n` tokens
   * also where lengths of documents do not add up to n, which lowtri refuses.
   */
  Lesson.mask = (text, n = null) => {
    const reader = new Reader(text);
    const value = reader.value(0);
    if (reader.token) throw reader.fail();
    if (!(value instanceof Mask)) throw new MaskError("error.syntax", { what: shown(text) });
    const total = n ? reader.totals.find((total) => total !== n) : undefined;
    if (total !== undefined) throw new MaskError("error.lengths", { total, n });
    return value.sees;
  };

  /** The table of a mask, n x n; true = may see. */
  Lesson.table = (sees, n) => Array.from({ length: n }, (_, q) => Array.from({ length: n }, (_, k) => !!sees(q, k)));

  /** A short text whose table is this one, or null: names a mask that was drawn by hand. */
  Lesson.nameOf = (table) => {
    const n = table.length;
    const counts = Array.from({ length: Math.min(n, 12) }, (_, i) => i + 1);
    const wanted = JSON.stringify(table);
    const same = (text) => JSON.stringify(Lesson.table(Lesson.mask(text), n)) === wanted;
    const candidates = [
      "causal", "full", "~causal", ...counts.map((w) => `causal & window(${w})`), ...counts.map((p) => `causal | first(${p})`),
      ...counts.map((p) => `first(${p})`), ...counts.map((c) => `causal & chunks(${c})`), ...counts.map((c) => `chunks(${c})`),
      ...counts.map((c) => `causal & strided(${c})`), ...counts.map((c) => `strided(${c})`),
      ...counts.map((w) => `causal - window(${w})`), "full - window(1)",
      ...counts.flatMap((w) => counts.map((s) => `causal & (window(${w}) | first(${s}))`)),
      ...counts.flatMap((a) => counts.map((b) => `band(${a - 1}, ${b - 1})`)),
      ...counts.slice(0, -1).map((d) => `causal & documents(lengths=[${d}, ${n - d}])`),
      ...counts.slice(0, -1).map((d) => `documents(lengths=[${d}, ${n - d}])`),
    ];
    return candidates.find(same) ?? null;
  };
})();
