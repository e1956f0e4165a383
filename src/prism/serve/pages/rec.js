// The recommender's page: choose a person, click what they would click, see how the list follows.

import { $, ago, announce, api, attempt, bytes, count, el, lastPart, milliseconds, plural, poll, say, themeButton } from "./common.js";
import { Chart, secondsAgo } from "./chart.js";
import { typeahead } from "./typeahead.js";

const HOW_MANY = 10;
const HISTORY = 50;
const WHY = 2; // nearest events shown per recommendation
const NEARLY = 0.6;
const TYPE = "click";

/** Who is looked at: a user's id, or null for an anonymous visitor, whose history is kept on this page only. */
let user = null;
let visit = []; // the anonymous visitor's items, oldest first
let latest = 0; // number of the last refresh that was asked for: answers of older ones are dropped
let before = null; // the list shown before, item → place
let fresh = null; // the item clicked last

const path = (id) => encodeURIComponent(id);

// Reading

async function readUser() {
  const query = `n=${HOW_MANY}&exclude-seen=${!$("seen").checked}&detail=true`;
  const id = user;
  const readFacts = async () => {
    // Ids are in order, so the user itself comes first; one without events has no page, which is no error here
    const [first] = await api(`/api/users?prefix=${path(id)}&n=1`);
    return first?.UserId === id ? api(`/api/user/${path(id)}?n=${HISTORY}`) : { EventCount: 0, Feedback: [] };
  };
  const [facts, list] = await Promise.all([readFacts(), api(`/api/recommend/${path(id)}?${query}`)]);
  return { facts, list };
}

async function readVisit() {
  const body = visit.map(({ item, time }) => ({ FeedbackType: TYPE, UserId: "", ItemId: item, Timestamp: time }));
  const query = `n=${HOW_MANY}&exclude-seen=${!$("seen").checked}&detail=true`;
  const list = await api(`/api/session/recommend?${query}`, { method: "POST", body });
  return { facts: null, list: list.map(({ Id, ...rest }) => ({ ItemId: Id, ...rest })) };
}

/** Ask for history and recommendations, and show them. `clicked` says what the reader has just added. */
async function refresh(clicked = null) {
  const turn = ++latest;
  const { facts, list } = await (user === null ? readVisit() : readUser());
  if (turn !== latest) return;
  fresh = clicked;
  showPast(facts);
  showNext(list);
  if (clicked !== null && list.length > 0) {
    const changed = list.filter((entry) => before && !before.has(entry.ItemId)).length;
    announce(`${clicked} stored. ${plural(changed, "new recommendation")}. First is now ${list[0].ItemId}.`);
  }
  before = new Map(list.map((entry, i) => [entry.ItemId, i]));
}

// Acting

async function click(item) {
  const time = new Date().toISOString();
  if (user === null) visit.push({ item, time });
  else {
    const body = [{ FeedbackType: TYPE, UserId: user, ItemId: item, Timestamp: time }];
    await api("/api/feedback", { method: "POST", body });
  }
  await refresh(item);
}

function choose(id) {
  user = id;
  before = null;
  fresh = null;
  history.replaceState(null, "", id === null ? location.pathname : `#user=${path(id)}`);
  markPeople();
  return attempt(() => refresh());
}

function forget() {
  const close = () => {
    dialog.close();
    dialog.remove();
    $("user").focus();
  };
  const dialog = el(
    "dialog",
    { "aria-labelledby": "forget-title" },
    el(
      "form",
      {
        onsubmit: (event) => {
          event.preventDefault();
          attempt(async () => {
            const done = await api(`/api/user/${path(user)}`, { method: "DELETE" });
            say(`${user} is forgotten: ${plural(done.RowAffected, "event")} deleted.`);
            await Promise.all([choose(user), showPeople()]);
          });
          close();
        },
      },
      el("h2", { id: "forget-title" }, `Forget ${user}?`),
      el("p", { class: "quiet" }, "All events of this user and the memory made from them are deleted for good."),
      el(
        "div",
        { class: "row" },
        el("button", { type: "button", onclick: close }, "Keep"),
        el("button", { type: "submit", class: "danger" }, "Delete everything"),
      ),
    ),
  );
  document.body.append(dialog);
  dialog.showModal();
}

// Showing

const fact = (name, value, title) => el("div", title ? { title } : {}, el("dt", {}, name), el("dd", {}, value));

function showPast(facts) {
  $("past-title").textContent = user ?? "Anonymous visitor";
  $("forget").hidden = user === null || facts.EventCount === 0;
  const events = facts
    ? facts.Feedback.map((one) => ({ item: one.ItemId, time: one.Timestamp, known: one.Known !== false }))
    : visit.map((one, place) => ({ ...one, known: true, place })).reverse();
  const rows = [fact("events", count(facts ? facts.EventCount : visit.length))];
  if (facts?.StateBytes) {
    rows.push(fact("memory, always this size", bytes(facts.StateBytes), "The state of fixed size that stands for the whole history"));
  }
  if (facts && facts.StateAge !== null && facts.StateAge !== undefined) rows.push(fact("memory updated", ago(facts.StateAge)));
  $("facts").replaceChildren(...rows);
  const outcome = user === null ? "The list changes, and nothing is stored." : "It is stored, and the list changes.";
  $("next-help").textContent = `Click an item, as this person would. ${outcome}`;
  $("history-title").hidden = events.length === 0;
  if (events.length === 0) {
    const text = "Nothing yet. Until the first click, the list shows what is popular.";
    $("history").replaceChildren(el("li", { class: "empty" }, text));
    return;
  }
  $("history").replaceChildren(...events.map(showEvent));
  $("history").scrollTop = 0;
}

function showEvent({ item, time, known, place }, i) {
  const when = new Date(time);
  const seconds = (Date.now() - when) / 1000;
  let end = el("time", { datetime: time, title: when.toLocaleString() }, Number.isNaN(seconds) ? "" : ago(Math.max(0, seconds)));
  if (place !== undefined) {
    const remove = () => {
      visit.splice(place, 1);
      attempt(() => refresh()).then(() => $("history").focus());
    };
    end = el("button", { class: "small plain", type: "button", "aria-label": `Remove ${item}`, onclick: remove }, "Remove");
  }
  const row = el(
    "li",
    { class: i === 0 && item === fresh ? "fresh" : null },
    el("span", known ? {} : { class: "unknown", title: "The model does not know this item" }, item),
    known ? null : el("span", { class: "note" }, "not known to the model"),
    end,
  );
  row.dataset.item = item;
  return row;
}

/** The badge that says how an item moved since the last list. */
function movement(item, place) {
  if (before === null || fresh === null) return null;
  if (!before.has(item)) return el("span", { class: "moved new" }, "new");
  const steps = before.get(item) - place;
  if (steps === 0) return null;
  const [kind, sign, word] = steps > 0 ? ["up", "▲", "up"] : ["down", "▼", "down"];
  return el("span", { class: `moved ${kind}`, "aria-label": `${word} ${Math.abs(steps)}` }, `${sign} ${Math.abs(steps)}`);
}

/** The events that an item is close to; the second only if it is nearly as close as the first. */
function nearest(entry) {
  const because = (entry.Because ?? []).filter((event) => event.ItemId !== entry.ItemId);
  const enough = Math.max(0, (because[0]?.Similarity ?? 0) * NEARLY);
  return because.slice(0, WHY).filter((event) => event.Similarity > enough).map((event) => event.ItemId);
}

function why(near) {
  if (near.length === 0) return null;
  return el("span", { class: "why" }, "close to ", near.flatMap((item, i) => [i > 0 ? " and " : "", el("b", {}, item)]));
}

function showNext(list) {
  const host = $("next");
  const focused = [...host.children].findIndex((row) => row.contains(document.activeElement));
  const places = new Map([...host.children].map((row) => [row.dataset.item, row.getBoundingClientRect().top]));
  const best = Math.max(...list.map((entry) => entry.Score));
  const rows = list.map((entry, i) => showRecommendation(entry, i, best));
  if (rows.length === 0) rows.push(el("li", { class: "empty" }, "No item is left to recommend."));
  host.replaceChildren(...rows);
  // The reader's place in the list stays, though other items stand there now
  if (focused >= 0) rows[Math.min(focused, rows.length - 1)].querySelector("button")?.focus({ preventScroll: true });
  if (before !== null && fresh !== null) slide(rows, places);
}

function showRecommendation(entry, i, best) {
  // Scores are logarithms of odds: this is the chance against that of the best one
  const share = Number.isFinite(entry.Score) ? Math.exp(Math.min(0, entry.Score - best)) : 0;
  const fillBar = el("i");
  fillBar.style.width = `${Math.max(2, 100 * share)}%`;
  const near = nearest(entry);
  const button = el(
    "button",
    {
      class: "rec",
      type: "button",
      onclick: () => attempt(() => click(entry.ItemId)),
      onpointerenter: () => highlight(near),
      onpointerleave: () => highlight([]),
      onfocus: () => highlight(near),
      onblur: () => highlight([]),
    },
    el("span", { class: "rank", "aria-hidden": "true" }, i + 1),
    el("span", {}, el("span", { class: "name" }, entry.ItemId), movement(entry.ItemId, i), why(near)),
    el("span", { class: "bar", title: `Score ${entry.Score?.toFixed?.(3)}; the bar compares with the first`, "aria-hidden": "true" }, fillBar),
  );
  const row = el("li", {}, button);
  row.dataset.item = entry.ItemId;
  return row;
}

/** Mark the events of the history that an item is close to. */
function highlight(items) {
  let first = null;
  for (const row of $("history").children) {
    const close = items.includes(row.dataset.item);
    row.classList.toggle("close", close);
    if (close) first ??= row;
  }
  // Only within the history: the page itself must not jump
  if (first) $("history").scrollTop = Math.max(0, first.offsetTop - 40);
}

/** Let rows glide from where they stood to where they stand. */
function slide(rows, places) {
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) return;
  for (const row of rows) {
    if (!places.has(row.dataset.item)) {
      row.animate([{ opacity: 0, transform: "translateX(12px)" }, { opacity: 1, transform: "none" }], { duration: 350, easing: "ease-out" });
      continue;
    }
    const shift = places.get(row.dataset.item) - row.getBoundingClientRect().top;
    if (shift) row.animate([{ transform: `translateY(${shift}px)` }, { transform: "none" }], { duration: 350, easing: "ease-out" });
  }
}

// People

async function showPeople() {
  const found = await api("/api/users?n=5");
  $("people").replaceChildren(person(null, "Anonymous visitor"), ...found.map(({ UserId }) => person(UserId, UserId)));
  markPeople();
}

function person(id, text) {
  const row = el("li", {}, el("button", { class: "small", type: "button", onclick: () => choose(id) }, text));
  row.dataset.user = id ?? "";
  return row;
}

/** Mark who is looked at; someone found by search is added. */
function markPeople() {
  const host = $("people");
  const rows = () => [...host.children];
  if (user !== null && host.children.length > 0 && rows().every((row) => row.dataset.user !== user)) {
    rows().find((row) => row.classList.contains("found"))?.remove();
    const row = person(user, user);
    row.classList.add("found");
    host.append(row);
  }
  rows().forEach((row) => row.firstChild.setAttribute("aria-pressed", String(row.dataset.user === (user ?? ""))));
}

/** What starts with a text, or else with the same text and a capital letter. */
async function startingWith(list, text, signal) {
  const found = await api(`/api/${list}?prefix=${path(text)}&n=20`, { signal });
  const capital = text.charAt(0).toUpperCase() + text.slice(1);
  return found.length > 0 || capital === text ? found : api(`/api/${list}?prefix=${path(capital)}&n=20`, { signal });
}

async function findUsers(text, signal) {
  const found = await startingWith("users", text, signal);
  const options = found.map(({ UserId, EventCount }) => ({ value: UserId, label: UserId, note: plural(EventCount, "event") }));
  if (text !== "" && !found.some(({ UserId }) => UserId === text)) {
    options.push({ value: text, label: text, note: "new user" });
  }
  return options;
}

async function findItems(text, signal) {
  const found = await startingWith("items", text, signal);
  return found.map(({ ItemId, Count }) => ({ value: ItemId, label: ItemId, note: plural(Count, "event") }));
}

// The server

const recent = (values, seconds) => values.slice(-seconds).filter((value) => value !== null && value !== undefined);
const sum = (values) => values.reduce((total, value) => total + value, 0);
const perSecond = (values) => (values.length ? sum(recent(values, 10)) / Math.min(10, values.length) : 0);
const lastOf = (values) => recent(values, 120).at(-1) ?? null;
const rate = (value) => (value === 0 || value >= 10 ? count(Math.round(value)) : value.toFixed(1));

function charts() {
  const short = (value) => (value >= 1000 ? count(value) : String(Number(value.toPrecision(2))));
  return [
    new Chart($("throughput"), {
      label: "Events and requests per second",
      series: [{ name: "events", color: "blue", fill: true }, { name: "requests", color: "orange" }],
      format: short,
      ticks: secondsAgo,
    }),
    new Chart($("latency"), {
      label: "Milliseconds to answer",
      series: [{ name: "half are faster (p50)", color: "blue", fill: true }, { name: "99 of 100 are faster (p99)", color: "orange" }],
      format: short,
      ticks: secondsAgo,
    }),
  ];
}

async function showServer([throughput, latency]) {
  const stats = await api("/api/stats");
  const { Model: model, Series: series } = stats;
  for (const times of [series.P50, series.P99]) {
    series.Requests.forEach((requests, i) => requests === 0 && (times[i] = null)); // no request took no time
  }
  $("model").title = model.name;
  $("model").textContent = [
    lastPart(model.name),
    `layers ${model.layers}`,
    plural(model.items, "item"),
    `${count(model.parameters)} parameters`,
    `${bytes(model.state_bytes)} of memory per user`,
  ].join(" · ");
  const [p50, p99] = [lastOf(series.P50), lastOf(series.P99)];
  $("tiles").replaceChildren(
    fact("users", count(stats.Users)),
    fact("events stored", count(stats.Events)),
    fact("events a second", rate(perSecond(series.Events))),
    fact("typical answer (p50)", milliseconds(p50)),
    fact("slow answer (p99)", milliseconds(p99)),
  );
  const said = `${rate(perSecond(series.Events))} events and ${rate(perSecond(series.Requests))} requests a second`;
  throughput.update(series.Second, [series.Events, series.Requests], said);
  latency.update(series.Second, [series.P50, series.P99], `half within ${milliseconds(p50)}, 99 of 100 within ${milliseconds(p99)}`);
}

// Start

themeButton();
typeahead($("user"), $("users"), findUsers, ({ value }) => choose(value).then(() => $("next").querySelector("button")?.focus()));
typeahead($("item"), $("items"), findItems, ({ value }) => attempt(() => click(value)).then(() => $("item").focus()));
$("forget").addEventListener("click", forget);
$("seen").addEventListener("change", () => {
  fresh = null;
  attempt(() => refresh());
});
const asked = /^#user=(.+)$/.exec(location.hash);
await choose(asked ? decodeURIComponent(asked[1]) : null);
await attempt(showPeople);
const drawn = charts();
poll(() => showServer(drawn), 2000);
