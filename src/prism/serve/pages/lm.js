// The language model's page: branches of a text side by side, the memory behind them, the states that are kept.

import { $, api, attempt, bytes, count, el, lastPart, plural, poll, say, themeButton } from "./common.js";
import { Branch } from "./branch.js";
import { Chart, secondsAgo } from "./chart.js";
import { showMemory } from "./memory.js";
import { showStates } from "./states.js";

const LETTERS = "ABCD";

let model = { name: "", chat: false, state_bytes: 0, kv_bytes_per_token: 1 };
let branches = [];
let active = null;
let states = { data: [], bytes: 0 };
let read = { characters: 0, tokens: 0 }; // how long a token is, from what was counted so far
const labels = new Map(); // state → the last words that it has read

const page = {
  model: () => model,
  charactersPerToken: () => (read.tokens > 0 ? read.characters / read.tokens : 4),
  settings() {
    const number = (id) => ($(id).value === "" || !$(id).validity.valid ? undefined : Number($(id).value));
    return { temperature: number("temperature"), top_p: number("top-p"), max_tokens: number("most"), seed: number("seed") };
  },
  changed(branch) {
    branch.show();
    if (branch === active) showActive();
  },
  async stored(branch) {
    if (branch.state !== null && branch.pending.length === 0) {
      const text = branch.turns.map((turn) => turn.text).join(" ");
      labels.set(branch.state, `…${text.slice(-24).replace(/^\S*\s/, "").trim()}`.replace(/\s+/g, " "));
    }
    await refresh();
    const found = states.data.find((state) => state.id === branch.state);
    if (found && branch.pending.length === 0) {
      branch.tokens = found.tokens;
      if (branch.hidden === 0) {
        read = { characters: branch.turns.reduce((sum, turn) => sum + turn.text.length, 0), tokens: found.tokens };
      }
    }
    page.changed(branch);
  },
  fork: (branch) => attempt(() => fork(branch)),
  close,
  activate,
};

// Branches

function open() {
  const letter = [...LETTERS].find((one) => branches.every((branch) => branch.letter !== one));
  if (letter === undefined) throw new Error(`${LETTERS.length} branches are open: close one first.`);
  const branch = new Branch(page, letter);
  branches.push(branch);
  $("branches").append(branch.node);
  showSwitch();
  return branch;
}

async function fork(branch) {
  const other = open();
  try {
    const state = branch.state === null ? null : (await api(`/v1/states/${branch.state}/fork`, { method: "POST", body: {} })).id;
    branch.copyTo(other, state);
    if (state !== null && labels.has(branch.state)) labels.set(state, labels.get(branch.state));
  } catch (error) {
    close(other);
    throw error;
  }
  activate(other);
  other.box.focus();
  await page.stored(other);
  say(`Branch ${other.letter} is a copy of branch ${branch.letter}: write on in either.`);
}

function close(branch) {
  branch.stop();
  branch.node.remove();
  branches = branches.filter((one) => one !== branch);
  if (branches.length === 0) open();
  activate(branches.at(-1));
  branches.at(-1).box.focus();
  showSwitch();
  attempt(refresh);
}

function activate(branch) {
  if (active === branch) return;
  active = branch;
  branches.forEach((one) => one.node.classList.toggle("active", one === branch));
  showSwitch();
  showActive();
}

function showActive() {
  const stored = states.data.find((state) => state.id === active.state);
  showMemory(active.tokens, model, stored?.bytes);
}

/** On a phone one branch is shown at a time. */
function showSwitch() {
  $("switch").hidden = branches.length < 2;
  $("switch").replaceChildren(
    ...branches.map((branch) =>
      el("button", { class: "small", type: "button", "aria-pressed": String(branch === active), onclick: () => activate(branch) }, `Branch ${branch.letter}`),
    ),
  );
  const alone = branches.length < 2;
  for (const branch of branches) {
    branch.closeButton.hidden = alone && branch.empty;
    branch.closeButton.textContent = alone ? "New" : "Close";
    branch.closeButton.setAttribute("aria-label", alone ? "Start over" : `Close branch ${branch.letter}`);
  }
}

// States

async function refresh() {
  states = await api("/v1/states");
  const standing = new Map();
  for (const branch of branches) {
    if (branch.state !== null) standing.set(branch.state, [...(standing.get(branch.state) ?? []), branch.letter]);
  }
  showStates(states, labels, standing, {
    open: (state) => attempt(() => openState(state)),
    remove: (state) => attempt(() => remove([state])),
  });
  showSwitch();
}

/** A state in an empty branch, or in a new one. Reading on from it leaves the state itself as it is. */
async function openState(state) {
  const branch = branches.find((one) => one.empty && !one.abort) ?? open();
  const source = branches.find((one) => one.state === state.id && one !== branch);
  if (source && source.pending.length === 0) source.copyTo(branch, state.id);
  else {
    branch.state = state.id;
    branch.hidden = branch.tokens = state.tokens;
    branch.write();
    branch.show();
  }
  activate(branch);
  branch.box.focus();
  await page.stored(branch);
}

async function remove(list) {
  await Promise.all(list.map((state) => api(`/v1/states/${state.id}`, { method: "DELETE" })));
  const gone = new Set(list.map((state) => state.id));
  // A branch whose state is gone reads its text again at the next turn
  for (const branch of branches.filter((one) => gone.has(one.state))) branch.lose();
  await refresh();
}

function tidy() {
  const standing = new Set(branches.map((branch) => branch.state));
  return remove(states.data.filter((state) => !standing.has(state.id)));
}

// The server

async function showServer(chart) {
  const stats = await api("/api/stats");
  const first = model.name === "";
  model = stats.Model;
  $("model").title = model.name;
  $("model").textContent = [
    lastPart(model.name),
    plural(model.layers, "layer"),
    `${count(model.parameters)} parameters`,
    `${bytes(model.state_bytes)} of memory per text`,
  ].join(" · ");
  $("busy").textContent = stats.Active + stats.Waiting === 0 ? "idle" : `${count(stats.Active)} writing, ${count(stats.Waiting)} waiting`;
  const { Second: seconds, Tokens: tokens } = stats.Series;
  chart.update(seconds, [tokens], `${count(tokens.slice(-10).reduce((sum, value) => sum + value, 0) / 10)} a second`);
  if (first) branches.forEach((branch) => branch.write());
  showBranches();
  if (first) {
    await refresh();
    showBranches();
  }
}

function showBranches() {
  branches.forEach((branch) => branch.show());
  showActive();
}

// Start

themeButton();
activate(open());
$("tidy").addEventListener("click", () => attempt(tidy));
new ResizeObserver(() => showActive()).observe($("memory"));
const chart = new Chart($("tokens"), {
  label: "Tokens per second",
  series: [{ name: "tokens a second", color: "blue", fill: true }],
  format: (value) => (value >= 1000 ? count(value) : String(Number(value.toPrecision(2)))),
  ticks: secondsAgo,
});
poll(() => showServer(chart), 2000);
active.box.focus();
