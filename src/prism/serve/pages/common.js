// What both pages share: elements without HTML strings, requests with the API key, numbers in words, the theme button.

/** An element with attributes, listeners (`onclick: f`) and children. Text stays text, whatever it contains. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const $ = (id) => document.getElementById(id);

// Numbers

const whole = new Intl.NumberFormat("en");
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });

/** 1,234 or 1.2M. */
export const count = (value) => (Math.abs(value) < 100000 ? whole : short).format(value);

/** 1,234 bytes as `1.2 KB`. */
export function bytes(value) {
  const units = ["bytes", "KB", "MB", "GB", "TB"];
  let unit = 0;
  while (value >= 1000 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

/** 0.42, 4.2, 42 or 420 milliseconds: two figures are enough. */
export function milliseconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 10000) return `${Math.round(value / 1000)} s`;
  return `${value >= 10 ? Math.round(value) : value >= 1 ? value.toFixed(1) : value.toFixed(2)} ms`;
}

/** The last part of a path: a model is called by its folder. */
export const lastPart = (name) => name.split("/").filter(Boolean).at(-1) ?? name;

/** One thing, two things. */
export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Seconds since something, as people say it. */
export function ago(seconds) {
  if (seconds < 5) return "just now";
  for (const [size, name] of [[86400 * 365, "year"], [86400, "day"], [3600, "hour"], [60, "minute"], [1, "second"]]) {
    if (seconds >= size) return `${plural(Math.floor(seconds / size), name)} ago`;
  }
  return "just now";
}

// Messages

/** Say something to everyone: shown at the bottom for a while, and read out. */
export function say(text, kind = "note") {
  const box = $("message");
  box.textContent = text;
  box.dataset.kind = kind;
  box.classList.add("shown");
  clearTimeout(say.timer);
  say.timer = setTimeout(() => box.classList.remove("shown"), kind === "error" ? 9000 : 4000);
}

/** Say something to screen readers only. */
export function announce(text) {
  $("spoken").textContent = text;
}

// Requests

const KEY = "prism-api-key";
let memory = null; // the key, also where storage is off

function storedKey() {
  try {
    return sessionStorage.getItem(KEY) ?? memory;
  } catch {
    return memory;
  }
}

function storeKey(key) {
  memory = key;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Kept in memory until the page is closed.
  }
}

let asking = null;

/** Ask for the API key. Several requests that are refused at once share one question. */
function askForKey(refused) {
  asking ??= new Promise((resolve) => {
    const input = el("input", { id: "key", type: "password", autocomplete: "off", required: true, spellcheck: "false" });
    const wrong = refused ? el("p", { class: "wrong", role: "alert" }, "The server did not accept this key.") : null;
    const form = el(
      "form",
      { method: "dialog" },
      el("h2", { id: "key-title" }, "This server asks for a key"),
      el("p", { class: "quiet" }, "Its owner set one at the start. It is kept until you close this tab."),
      wrong,
      el("label", { for: "key" }, "API key"),
      input,
      el("button", { class: "primary", type: "submit" }, "Continue"),
    );
    const dialog = el("dialog", { "aria-labelledby": "key-title", class: "key" }, form);
    dialog.addEventListener("cancel", (event) => event.preventDefault());
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      storeKey(input.value.trim());
      dialog.close();
      dialog.remove();
      asking = null;
      resolve();
    });
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
  return asking;
}

/** fetch with the key; a refusal asks for it and tries again. */
export async function request(path, options = {}) {
  for (;;) {
    const key = storedKey();
    const headers = { ...(options.headers ?? {}) };
    if (key !== null) headers.Authorization = `Bearer ${key}`;
    const response = await fetch(path, { ...options, headers });
    if (response.status !== 401) return response;
    if (storedKey() === key) await askForKey(key !== null);
  }
}

/** The reason that an answer other than 2xx gives, in one sentence. */
export async function reason(response) {
  const text = await response.text();
  try {
    const body = JSON.parse(text);
    const said = body.error?.message ?? body.error ?? body.detail ?? body.message ?? text;
    return typeof said === "string" ? said : JSON.stringify(said);
  } catch {
    return text || `The server answered ${response.status}.`;
  }
}

/** JSON of a GET, or of another method with a body. Errors carry the server's sentence. */
export async function api(path, { method = "GET", body, signal } = {}) {
  const response = await request(path, {
    method,
    signal,
    headers: body === undefined ? {} : { "Content-Type": "application/json" },
    body: body === undefined ? undefined : JSON.stringify(body),
  });
  if (!response.ok) {
    const error = new Error(await reason(response));
    error.status = response.status;
    throw error;
  }
  return response.status === 204 ? null : response.json();
}

/** Run an action of the reader's and show what went wrong, if something did. */
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    if (error.name === "AbortError") return undefined;
    say(error instanceof TypeError ? "The server does not answer. Is it still running?" : error.message, "error");
    return undefined;
  }
}

/** Call an action now and every few seconds while the tab is visible; a server that is gone is shown, and asked again. */
export function poll(action, every) {
  const offline = $("offline");
  const once = async () => {
    if (!document.hidden) {
      try {
        await action();
        offline.hidden = true;
      } catch {
        offline.hidden = false;
      }
    }
    setTimeout(once, every);
  };
  once();
}

// Theme

/** The button that switches between light and dark, and remembers it. */
export function themeButton() {
  const button = $("theme");
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
  const show = () => {
    const other = dark() ? "light" : "dark";
    button.textContent = dark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${other} colours`);
  };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    try {
      localStorage.setItem("prism-theme", root.dataset.theme);
    } catch {
      // Holds until the page is closed.
    }
    show();
  });
  system.addEventListener("change", show);
  show();
}
