"use strict";
// A small language model, whole: from the characters of a text to the probabilities of the next one. The text has N characters;
// each becomes a vector of `width` numbers, which the layers change step by step.

(() => {
  const Lesson = globalThis.Lesson;
  const EPSILON = 1e-5;

  /** The numbers of stored weights, read in order: a matrix is a list of rows, each of int8 times the scale of the row. */
  class Weights {
    constructor({ int8, float32 }) {
      const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer;
      this.int8 = new Int8Array(bytes(int8));
      this.float32 = new Float32Array(bytes(float32));
      this.int8At = 0;
      this.float32At = 0;
    }

    vector(length) {
      this.float32At += length;
      return this.float32.subarray(this.float32At - length, this.float32At);
    }

    matrix(rows, columns) {
      return Array.from({ length: rows }, () => {
        const [scale] = this.vector(1);
        this.int8At += columns;
        return Float32Array.from(this.int8.subarray(this.int8At - columns, this.int8At), (x) => x * scale);
      });
    }
  }

  function load(stored) {
    const numbers = new Weights(stored);
    const weights = {};
    for (const [name, rows, columns] of stored.tensors) {
      weights[name] = columns === undefined ? numbers.vector(rows) : numbers.matrix(rows, columns);
    }
    return { ...stored, weights, characters: [...stored.characters] };
  }

  /** A text as numbers; capitals become small letters, and characters that the model never read are left out. */
  const encode = (model, text) =>
    [...text.toLowerCase()].map((c) => model.characters.indexOf(c)).filter((id) => id >= 0);

  const add = (a, b) => a.map((x, i) => x + b[i]);

  const dot = (a, b) => {
    let sum = 0;
    for (let i = 0; i < a.length; i++) sum += a[i] * b[i];
    return sum;
  };

  /** A trained map: a dot product with each row of the matrix. */
  const linear = (matrix, bias, x) => {
    const y = new Float32Array(matrix.length);
    for (let row = 0; row < y.length; row++) y[row] = dot(matrix[row], x) + bias[row];
    return y;
  };

  /** The numbers of a vector at mean 0 and variance 1, then at a scale and a shift that were learned. */
  const layerNorm = (scale, shift, x) => {
    const mean = x.reduce((sum, n) => sum + n, 0) / x.length;
    const centred = x.map((n) => n - mean);
    const deviation = Math.sqrt(dot(centred, centred) / x.length + EPSILON);
    return centred.map((n, i) => (n / deviation) * scale[i] + shift[i]);
  };

  const gelu = (x) => 0.5 * x * (1 + Math.tanh(Math.sqrt(2 / Math.PI) * (x + 0.044715 * x ** 3)));

  /** Scores as shares of 1. exp(−∞) is 0: what the mask hides gets no share. */
  function softmax(scores) {
    const most = scores.reduce((a, b) => Math.max(a, b));
    const shares = scores.map((score) => Math.exp(score - most));
    const sum = shares.reduce((a, b) => a + b);
    return shares.map((share) => share / sum);
  }

  /** One head: each query compares itself with the keys that it may see, and mixes their values. */
  function attend(queries, keys, values, masked) {
    const size = values[0].length;
    const weights = queries.map((query, i) => softmax(Float32Array.from(keys, (key, j) =>
      masked && j > i ? -Infinity : dot(query, key) / Math.sqrt(size))));
    const outputs = weights.map((row) => {
      const mixed = new Float32Array(size);
      row.forEach((share, j) => {
        if (share > 0) for (let d = 0; d < size; d++) mixed[d] += share * values[j][d];
      });
      return mixed;
    });
    return { weights, outputs };
  }

  /** The logits of the next character at every place, and the attention weights of every layer and head. */
  function forward(model, ids, masked) {
    const W = model.weights;
    const size = model.width / model.heads;
    const attention = [];
    let x = ids.map((id, place) => add(W.embed_tokens[id], W.embed_positions[place]));
    for (let layer = 0; layer < model.layers; layer++) {
      const of = (name) => W[`layers.${layer}.${name}`];
      const project = (name, rows) => rows.map((row) => linear(of(name), of(`${name}.bias`), row));
      const normed = (name, rows) => rows.map((row) => layerNorm(of(name), of(`${name}.bias`), row));

      const before = normed("input_layernorm", x);
      const [q, k, v] = ["q", "k", "v"].map((name) => project(`self_attn.${name}_proj`, before));
      const heads = Array.from({ length: model.heads }, (_, head) => {
        const part = (rows) => rows.map((row) => row.subarray(head * size, (head + 1) * size));
        return attend(part(q), part(k), part(v), masked);
      });
      const joined = ids.map((_, i) => Float32Array.from(heads.flatMap((head) => [...head.outputs[i]])));
      const attended = project("self_attn.o_proj", joined);
      x = x.map((row, i) => add(row, attended[i]));

      const wide = project("up_proj", normed("post_attention_layernorm", x)).map((row) => row.map(gelu));
      const narrow = project("down_proj", wide);
      x = x.map((row, i) => add(row, narrow[i]));
      attention.push(heads.map((head) => head.weights));
    }
    const logits = x.map((row) => {
      const last = layerNorm(W.norm, W["norm.bias"], row);
      return Float32Array.from(W.embed_tokens, (embedding) => dot(embedding, last));
    });
    return { logits, attention };
  }

  /** Probabilities of the next character. A low temperature favours the likeliest, a high one evens them out. */
  const chances = (logits, temperature = 1) => softmax(logits.map((score) => score / temperature));

  /** A character drawn by its probability; `random` is a number from 0 to 1. */
  function draw(probabilities, random) {
    let left = random;
    const id = probabilities.findIndex((chance) => (left -= chance) < 0);
    return id < 0 ? probabilities.indexOf(Math.max(...probabilities)) : id;
  }

  Lesson.decoder = { load, encode, forward, chances, draw };
})();
