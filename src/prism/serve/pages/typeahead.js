// A search field with suggestions, after the combobox pattern: arrows move, Enter takes, Escape closes.

import { el } from "./common.js";

/**
 * Turn an input and an empty list into a combobox.
 * `find(text, signal)` returns suggestions {value, label, note}; `take(suggestion)` is called for the chosen one.
 */
export function typeahead(input, list, find, take) {
  let shown = [];
  let active = -1;
  let searched = null; // the text that the suggestions are for
  let timer = 0;
  let abort = null;

  Object.entries({
    role: "combobox",
    "aria-autocomplete": "list",
    "aria-expanded": "false",
    "aria-controls": list.id,
    autocomplete: "off",
    autocapitalize: "none",
    spellcheck: "false",
  }).forEach(([name, value]) => input.setAttribute(name, value));
  list.setAttribute("role", "listbox");
  list.tabIndex = -1; // a list that scrolls would otherwise be a stop of the Tab key

  function close() {
    clearTimeout(timer);
    abort?.abort();
    shown = [];
    searched = null;
    move(-1);
    list.hidden = true;
    list.replaceChildren();
    input.setAttribute("aria-expanded", "false");
  }

  function move(place) {
    active = place;
    [...list.children].forEach((option, i) => option.setAttribute("aria-selected", String(i === active)));
    if (active >= 0) {
      input.setAttribute("aria-activedescendant", list.children[active].id);
      list.children[active].scrollIntoView({ block: "nearest" });
    } else input.removeAttribute("aria-activedescendant");
  }

  function choose(place) {
    const suggestion = shown[place];
    close();
    input.value = "";
    take(suggestion);
  }

  function show(found) {
    shown = found;
    list.replaceChildren(
      ...found.map((suggestion, i) =>
        el(
          "li",
          {
            id: `${list.id}-${i}`,
            role: "option",
            "aria-selected": "false",
            // mousedown would move the focus out of the field, which closes the list before the click arrives
            onmousedown: (event) => event.preventDefault(),
            onclick: () => choose(i),
          },
          el("span", { class: "value" }, suggestion.label),
          suggestion.note ? el("span", { class: "note" }, suggestion.note) : null,
        ),
      ),
    );
    list.hidden = found.length === 0;
    input.setAttribute("aria-expanded", String(found.length > 0));
    move(found.length > 0 && input.value !== "" ? 0 : -1);
  }

  async function search() {
    abort?.abort();
    abort = new AbortController();
    const { signal } = abort;
    try {
      const wanted = input.value.trim();
      const found = await find(wanted, signal);
      if (signal.aborted || document.activeElement !== input) return;
      searched = wanted;
      show(found);
    } catch (error) {
      if (error.name !== "AbortError") close();
    }
  }

  input.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(search, 120);
  });
  input.addEventListener("focus", search);
  input.addEventListener("click", () => list.hidden && search());
  input.addEventListener("blur", close);
  input.addEventListener("keydown", async (event) => {
    if (event.isComposing) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      if (list.hidden) return search();
      const step = event.key === "ArrowDown" ? 1 : -1;
      move((active + step + shown.length + (active < 0 && step < 0 ? 1 : 0)) % shown.length);
    } else if (event.key === "Enter") {
      event.preventDefault();
      clearTimeout(timer);
      if (input.value.trim() !== searched) await search(); // the last letters may still be waiting for their search
      if (active >= 0) choose(active);
    } else if (event.key === "Escape") {
      if (list.hidden) input.value = "";
      else close();
    }
    return undefined;
  });
}
