// The list of states that the server keeps, as a tree: which text came from which.

import { $, bytes, el, plural } from "./common.js";

const DEEPEST = 3;

/** States in the order of a tree: each after its parent, with how often its line has branched. */
export function asTree(states) {
  const known = new Set(states.map((state) => state.id));
  const children = new Map();
  for (const state of [...states].sort((a, b) => a.created - b.created)) {
    const parent = known.has(state.parent) ? state.parent : null;
    children.set(parent, [...(children.get(parent) ?? []), state]);
  }
  const rows = [];
  const grown = (state) => (child) => child.tokens > state.tokens;
  const lines = [...(children.get(null) ?? [])].reverse().map((state) => [state, 0]);
  while (lines.length > 0) {
    const [state, depth] = lines.pop();
    rows.push({ ...state, depth });
    // The first child that has read more continues the line. Forks and others branch off, and stand before it.
    const next = children.get(state.id) ?? [];
    const first = next.find(grown(state)) ?? next[0];
    if (first) lines.push([first, depth]);
    for (const other of next.filter((child) => child !== first).reverse()) lines.push([other, depth + 1]);
  }
  return rows;
}

/**
 * Show states. `labels`: id → its last words; `open`: id → letters of the branches that stand there;
 * `act.open(state)` and `act.remove(state)` are called by the buttons.
 */
export function showStates(answer, labels, open, act) {
  const rows = asTree(answer.data);
  $("total").textContent = rows.length ? `${plural(rows.length, "state")} · ${bytes(answer.bytes)}` : "";
  $("tidy").hidden = rows.every((state) => open.has(state.id));
  const list = $("states");
  const place = [...list.children].findIndex((row) => row.contains(document.activeElement));
  list.replaceChildren(...rows.map((state) => showState(state, labels.get(state.id), open.get(state.id) ?? [], act)));
  if (rows.length === 0) list.append(el("li", { class: "empty" }, "None yet."));
  // A deleted row takes the focus with it: the next one gets it
  if (place >= 0) (list.children[Math.min(place, list.children.length - 1)].querySelector("button") ?? list.parentNode.querySelector("button"))?.focus();
}

function showState(state, label, letters, act) {
  const name = state.name || label || state.id;
  return el(
    "li",
    { class: `depth-${Math.min(DEEPEST, state.depth)}` },
    el(
      "span",
      { class: "label", title: state.id },
      letters.map((letter) => el("span", { class: "letter", title: `Branch ${letter} stands here` }, letter)),
      el("span", {}, name),
    ),
    el(
      "span",
      { class: "actions" },
      el("button", { class: "small plain", type: "button", "aria-label": `Open ${name}`, onclick: () => act.open(state) }, "Open"),
      el("button", { class: "small plain danger", type: "button", "aria-label": `Delete ${name}`, onclick: () => act.remove(state) }, "Delete"),
    ),
    el("span", { class: "size" }, `${plural(state.tokens, "token")} · ${bytes(state.bytes)}`),
  );
}
