// The picture of memory: a state that stays, and a KV cache that grows with every token.

import { $, bytes, count, el, plural, svg } from "./common.js";
import { nice } from "./chart.js";

const HEIGHT = 170;
const PAD = { left: 58, right: 14, top: 12, bottom: 24 };

const size = (name, value, color) => el("div", { class: color }, el("dt", {}, name), el("dd", {}, value));

/** One sentence that compares both. */
export function verdict(tokens, state, perToken, constant = true) {
  if (!constant) return "Some layers of this model keep every token, as a KV cache does: its state grows too.";
  const even = Math.ceil(state / perToken);
  if (tokens === 0) return `The state never grows. From ${plural(even, "token")} on, a KV cache takes more.`;
  const ratio = (tokens * perToken) / state;
  if (tokens <= even) return `Up to ${plural(even, "token")} a KV cache is smaller. The state stays as it is, the cache grows.`;
  return `A KV cache takes ${ratio >= 10 ? count(Math.round(ratio)) : ratio.toFixed(1)} times as much here, and grows. The state stays.`;
}

/** Show how much memory a text of so many tokens takes, of a model with these facts; `stored`: bytes of its last state. */
export function showMemory(tokens, { state_bytes: state, kv_bytes_per_token: perToken, constant_state: constant = true }, stored = null) {
  $("sizes").replaceChildren(
    constant ? size("state, any length", bytes(state), "blue") : size("state, so far", bytes(stored ?? state), "blue"),
    size("KV cache, so far", bytes(tokens * perToken), "orange"),
  );
  $("verdict").textContent = verdict(tokens, state, perToken, constant);
  draw($("memory"), tokens, state, perToken, constant);
}

/** The smallest round number of bytes, KB, MB … that is not below a value. */
function roundBytes(value) {
  const unit = 1024 ** Math.floor(Math.log(value) / Math.log(1024));
  return nice(value / unit) * unit;
}

function draw(host, tokens, state, perToken, constant) {
  const width = host.clientWidth;
  if (width < 80) return;
  const end = nice(Math.max(128, tokens * 1.2, (state / perToken) * 1.6));
  const top = roundBytes(Math.max(end * perToken, state * 1.5));
  const toX = (x) => PAD.left + (x / end) * (width - PAD.left - PAD.right);
  const toY = (y) => HEIGHT - PAD.bottom - (y / top) * (HEIGHT - PAD.top - PAD.bottom);
  const [left, right, low] = [toX(0), toX(end), toY(0)];
  const [now, cache, flat] = [toX(tokens), toY(tokens * perToken), toY(state)];
  const line = (name, x1, y1, x2, y2) => svg("line", { class: name, x1, y1, x2, y2 });
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const y = toY(top * share);
    parts.push(line("grid", left, y, right, y));
    parts.push(svg("text", { x: left - 7, y: y + 4, "text-anchor": "end" }, bytes(top * share)));
    parts.push(svg("text", { x: toX(end * share), y: HEIGHT - 5, "text-anchor": ["start", "middle", "end"][2 * share] }, share === 1 ? `${count(end)} tokens` : count(end * share)));
  }
  parts.push(
    line("curve orange ahead", now, cache, right, toY(end * perToken)),
    svg("path", { class: "area orange", d: `M${left} ${low}L${now} ${cache}L${now} ${low}Z` }),
    line("curve orange", left, low, now, cache),
    svg("circle", { class: "dot orange", cx: now, cy: cache, r: 4 }),
  );
  if (constant) {
    parts.push(
      line("curve blue ahead", now, flat, right, flat),
      svg("path", { class: "area blue", d: `M${left} ${low}V${flat}H${now}V${low}Z` }),
      line("curve blue", left, flat, now, flat),
      svg("circle", { class: "dot blue", cx: now, cy: flat, r: 4 }),
    );
  }
  let picture = host.firstElementChild;
  if (!picture) {
    picture = svg("svg", { class: "chart", role: "img" });
    host.append(picture);
  }
  picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
  picture.setAttribute("height", HEIGHT);
  picture.setAttribute("aria-label", `Memory by tokens. ${verdict(tokens, state, perToken, constant)}`);
  picture.replaceChildren(...parts);
}
