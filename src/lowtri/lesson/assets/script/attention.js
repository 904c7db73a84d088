"use strict";
// A sentence as words and numbers, and every step of attention. The same arithmetic as lowtri.explain, in double precision.

(() => {
  const Lesson = globalThis.Lesson;
  Lesson.MOST_TOKENS = 256;

  // Scripts without spaces between words: Thai, Lao, Burmese, Khmer, Chinese and Japanese with their punctuation.
  const UNSPACED = new RegExp(
    "[\\u0e00-\\u0eff\\u1000-\\u109f\\u1780-\\u17ff\\u3001-\\u312f\\u31f0-\\u31ff\\u3400-\\u4dbf\\u4e00-\\u9fff" +
    "\\uf900-\\ufaff\\uff01-\\uff0f\\uff1a-\\uff20\\uff3b-\\uff40\\uff5b-\\uff9f\\u{20000}-\\u{3ffff}]", "u");
  const MARK = /[\p{M}\u0e33\u0eb3]/u; // marks stay with the character that carries them

  /** A text cut at spaces, and by characters where its script has none, as lowtri's command cuts it. */
  Lesson.characters = (text) => text.split(/\s+/u).flatMap(charactersOf);

  function charactersOf(word) {
    const tokens = [];
    let base = "";
    for (const c of word) {
      const mark = MARK.test(c);
      if (base && (mark || !(UNSPACED.test(c) || UNSPACED.test(base)))) tokens[tokens.length - 1] += c;
      else tokens.push(c);
      base = base && mark ? base : c;
    }
    return tokens;
  }

  /** A run of an unspaced script as words that the page knows, from the place `at`; null if it is not made of them. */
  function known(run, words, at = 0) {
    if (at === run.length) return [];
    for (const word of words) {
      if (!run.startsWith(word, at)) continue;
      const rest = known(run, words, at + word.length);
      if (rest) return [word, ...rest];
    }
    return null;
  }

  /** A run of an unspaced script as its readers cut it: into words of the page, or by the browser's dictionary. */
  function wordsOf(run) {
    const found = known(run, Lesson.data.words ?? []);
    if (found) return found;
    if (!Intl.Segmenter) return charactersOf(run);
    const segmenter = new Intl.Segmenter(Lesson.data.language, { granularity: "word" });
    return [...segmenter.segment(run)].map(({ segment }) => segment);
  }

  /** A text as words: cut at spaces, and where its script has none as its readers cut it. */
  Lesson.tokens = (text) => {
    const tokens = [];
    let run = "";
    const flush = () => {
      if (run) tokens.push(...wordsOf(run));
      run = "";
    };
    for (const word of text.split(/\s+/u)) {
      for (const token of charactersOf(word)) {
        if (UNSPACED.test(token)) run += token;
        else {
          flush();
          tokens.push(token);
        }
      }
      flush();
    }
    return tokens;
  };

  const position = (p) => [Math.sin(p), Math.cos(p)];

  /** The words of the worked example have the numbers that give its encodings at their own places. */
  function ofExample(token) {
    const { example, sentences } = Lesson.data;
    const p = example && sentences ? sentences.example.indexOf(token) : -1;
    return p < 0 ? null : example.encodings[p].map((x, d) => x - position(p)[d]);
  }

  /** Two numbers for a token, the same ones wherever it stands: drawn from its characters, since no one trained them. */
  Lesson.embedding = (token) => ofExample(token) ?? drawn(token);

  function drawn(token) {
    let hash = 2166136261;
    for (const byte of new TextEncoder().encode(token)) hash = Math.imul(hash ^ byte, 16777619);
    const draw = () => {
      hash = (hash + 0x6d2b79f5) | 0;
      let x = Math.imul(hash ^ (hash >>> 15), 1 | hash);
      x = (x + Math.imul(x ^ (x >>> 7), 61 | x)) ^ x;
      return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
    };
    return [0, 1].map(() => Math.round((draw() * 4 - 2) * 100) / 100);
  }

  /** Encodings (N, 2): the embedding of each token plus the sinusoidal position, to two decimals. */
  Lesson.encodings = (tokens) => tokens.map((token, p) => {
    const place = position(p);
    return Lesson.embedding(token).map((x, d) => Math.round((x + place[d]) * 100) / 100);
  });

  // Plain loops: 200 tokens have 40,000 scores, and a phone computes them at every letter that is typed.
  const dot = (a, b) => {
    let sum = 0;
    for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
    return sum;
  };
  const column = (m, j) => m.map((row) => row[j]);
  Lesson.product = (a, b) => {
    const columns = b.length ? b[0].map((_, j) => column(b, j)) : [];
    return a.map((row) => columns.map((other) => dot(row, other)));
  };
  Lesson.transposed = (m) => (m.length ? m[0].map((_, j) => column(m, j)) : []);

  /** Weights of one row: 0 where hidden, and all 0 where the row sees nothing. The row's maximum is subtracted first. */
  Lesson.softmax = (row) => {
    const most = Math.max(...row);
    if (most === -Infinity) return row.map(() => 0);
    let sum = 0;
    const weights = new Array(row.length);
    for (let j = 0; j < row.length; j++) sum += weights[j] = Math.exp(row[j] - most);
    for (let j = 0; j < row.length; j++) weights[j] /= sum;
    return weights;
  };

  /** Every step for q, k, v (N, D) and a table of bools (N, N): scores, scaled, masked, weights, output. */
  Lesson.attend = ({ q, k, v }, visible) => {
    const scale = Math.sqrt(q.length ? q[0].length : 1);
    const scores = q.map((a) => k.map((b) => dot(a, b)));
    const scaled = scores.map((row) => row.map((x) => x / scale));
    const masked = scaled.map((row, i) => row.map((x, j) => (visible[i][j] ? x : -Infinity)));
    const weights = masked.map(Lesson.softmax);
    return { scores, scaled, masked, weights, output: Lesson.product(weights, v) };
  };
})();
