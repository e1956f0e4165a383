// Line charts in SVG: one horizontal axis, a few curves, a reading under the pointer.

import { el, svg } from "./common.js";

const HEIGHT = 150;
const PAD = { left: 44, right: 12, top: 10, bottom: 22 };

/** The smallest round number that is not below a value; its half is round too. */
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

/** `M x y L x y …` for points; nulls break the curve. */
function path(points) {
  let pen = "M";
  let text = "";
  for (const point of points) {
    if (point === null) {
      pen = "M";
      continue;
    }
    text += `${pen}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = "L";
  }
  return text;
}

/**
 * A chart in `host`, redrawn by `update(x, values)`.
 * `series`: [{name, color, fill?}]; `format(value)` labels values; `ticks(first, last)` labels the axis; `label` and the
 * summary of an update are read out.
 */
export class Chart {
  constructor(host, { series, format, ticks, label }) {
    Object.assign(this, { host, series, format, ticks, label });
    this.x = [];
    this.values = series.map(() => []);
    this.pointer = null;
    this.picture = svg("svg", { role: "img", class: "chart", "aria-label": label });
    this.tip = el("p", { class: "tip", hidden: true, "aria-hidden": "true" });
    host.replaceChildren(
      el(
        "ul",
        { class: "legend" },
        series.map((one) => el("li", { class: one.color }, el("i", {}), one.name)),
      ),
      this.picture,
      this.tip,
    );
    new ResizeObserver(() => this.draw()).observe(host);
    this.picture.addEventListener("pointermove", (event) => {
      this.pointer = event.offsetX;
      this.draw();
    });
    this.picture.addEventListener("pointerleave", () => {
      this.pointer = null;
      this.draw();
    });
  }

  update(x, values, summary) {
    this.x = x;
    this.values = values;
    this.picture.setAttribute("aria-label", `${this.label}: ${summary}`);
    this.draw();
  }

  draw() {
    const width = this.host.clientWidth;
    if (width < 60) return;
    const numbers = this.values.flat().filter((value) => value !== null && value !== undefined);
    const top = nice(Math.max(0, ...numbers));
    const [first, last] = this.x.length > 1 ? [this.x[0], this.x.at(-1)] : [0, 1];
    const toX = (x) => PAD.left + ((x - first) / (last - first)) * (width - PAD.left - PAD.right);
    const toY = (y) => HEIGHT - PAD.bottom - (y / top) * (HEIGHT - PAD.top - PAD.bottom);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      const y = toY(top * share);
      parts.push(svg("line", { class: "grid", x1: PAD.left, x2: width - PAD.right, y1: y, y2: y }));
      parts.push(svg("text", { x: PAD.left - 7, y: y + 4, "text-anchor": "end" }, this.format(top * share)));
    }
    for (const [x, text, anchor] of this.ticks(first, last)) {
      parts.push(svg("text", { x: toX(x), y: HEIGHT - 5, "text-anchor": anchor }, text));
    }
    this.series.forEach((one, s) => {
      const points = this.x.map((x, i) => {
        const value = this.values[s][i];
        return value === null || value === undefined ? null : [toX(x), toY(value)];
      });
      if (one.fill && points.length > 1 && !points.includes(null)) {
        const area = `${path(points)}L${points.at(-1)[0].toFixed(1)} ${toY(0)}L${points[0][0].toFixed(1)} ${toY(0)}Z`;
        parts.push(svg("path", { class: `area ${one.color}`, d: area }));
      }
      parts.push(svg("path", { class: `curve ${one.color}`, d: path(points) }));
      points.forEach((point, i) => {
        // A value between two gaps has no line to show it
        if (point && !points[i - 1] && !points[i + 1]) {
          parts.push(svg("circle", { class: `dot ${one.color}`, cx: point[0], cy: point[1], r: 1.8 }));
        }
      });
    });
    parts.push(...this.reading(toX, toY, width));
    this.picture.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.picture.setAttribute("height", HEIGHT);
    this.picture.replaceChildren(...parts);
  }

  /** The line under the pointer and its values. */
  reading(toX, toY, width) {
    this.tip.hidden = this.pointer === null || this.x.length === 0;
    if (this.tip.hidden) return [];
    const distance = this.x.map((x) => Math.abs(toX(x) - this.pointer));
    const i = distance.indexOf(Math.min(...distance));
    const x = toX(this.x[i]);
    const parts = [svg("line", { class: "cursor", x1: x, x2: x, y1: PAD.top, y2: HEIGHT - PAD.bottom })];
    const said = this.series.map((one, s) => {
      const value = this.values[s][i];
      if (value === null || value === undefined) return `${one.name} –`;
      parts.push(svg("circle", { class: `dot ${one.color}`, cx: x, cy: toY(value), r: 3.5 }));
      return `${one.name} ${this.format(value)}`;
    });
    this.tip.textContent = said.join(" · ");
    this.tip.style.left = `${Math.min(Math.max(x, 70), width - 70)}px`;
    return parts;
  }
}

/** Labels of an axis of seconds: how long ago, and now. */
export function secondsAgo(first, last) {
  const span = last - first;
  if (span < 10) return [[last, "now", "end"]];
  const middle = Math.round(span / 2 / 10) * 10;
  return [
    [first, span > 115 ? `${Math.round(span / 60)} min ago` : `${Math.round(span)} s ago`, "start"],
    [last - middle, middle === 60 ? "1 min" : `${middle} s`, "middle"],
    [last, "now", "end"],
  ];
}
