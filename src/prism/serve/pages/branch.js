// One branch of a text: what was written, the state that has read it, and the box to write on.

import { announce, attempt, bytes, el, plural } from "./common.js";
import { events } from "./stream.js";

let made = 0;

/**
 * A column of the page.
 * `page` gives `model()` (facts of the server), `settings()` of a request and `charactersPerToken()`, and does `fork(branch)`,
 * `close(branch)`, `activate(branch)`, `changed(branch)` (it has more tokens) and `stored(branch)` (it may have another state).
 */
export class Branch {
  constructor(page, letter) {
    Object.assign(this, { page, letter, turns: [], state: null, pending: [], tokens: 0, hidden: 0, abort: null });
    const id = `branch-${++made}`;
    this.paper = el("div", { class: "paper", role: "log", "aria-live": "off", tabindex: "0", "aria-label": `Text of branch ${letter}` });
    this.box = el("textarea", { id, rows: "2", placeholder: "Write the beginning of a text", enterkeyhint: "send", "aria-keyshortcuts": "Enter" });
    this.sendButton = el("button", { class: "primary", type: "submit" }, "Send");
    this.stopButton = el("button", { type: "button", hidden: true, onclick: () => this.stop() }, "Stop");
    this.forkButton = el("button", { class: "small", type: "button", title: "A copy of the memory: continue it in another way", onclick: () => page.fork(this) }, "Fork");
    this.closeButton = el("button", { class: "small", type: "button", "aria-label": `Close branch ${letter}`, onclick: () => page.close(this) }, "Close");
    this.size = el("span", { class: "quiet" });
    this.form = el(
      "form",
      { class: "composer" },
      el("label", { for: id, class: "spoken" }, `Your text for branch ${letter}`),
      this.box,
      el(
        "div",
        { class: "row" },
        el("span", { class: "quiet" }, el("kbd", { class: "key-of" }, "Enter"), " sends, ", el("kbd", { class: "key-of" }, "Shift Enter"), " new line"),
        this.sendButton,
        this.stopButton,
      ),
    );
    this.node = el(
      "section",
      { class: "panel branch", "aria-label": `Branch ${letter}` },
      el(
        "div",
        { class: "head" },
        el("span", { class: "letter", "aria-hidden": "true" }, letter),
        el("div", { class: "title" }, el("h2", {}, `Branch ${letter}`), this.size),
        el("div", { class: "actions" }, this.forkButton, this.closeButton),
      ),
      this.paper,
      this.form,
    );
    this.node.addEventListener("focusin", () => page.activate(this));
    this.node.addEventListener("keydown", (event) => event.key === "Escape" && this.abort && this.stop());
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      attempt(() => this.send(this.box.value));
    });
    this.box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.abort) this.form.requestSubmit();
    });
    this.box.addEventListener("input", () => this.show());
    this.show();
    this.write();
  }

  /** Another branch that has read and written the same, and stands at `state`. */
  copyTo(other, state) {
    other.turns = this.turns.map((turn) => ({ ...turn }));
    other.pending = [...this.pending];
    other.state = state;
    other.tokens = this.tokens;
    other.hidden = this.hidden;
    other.write();
    other.show();
  }

  get empty() {
    return this.turns.length === 0 && this.hidden === 0;
  }

  stop() {
    this.abort?.abort();
  }

  /** Send a text, and write down what comes back. Without a text the model writes more. */
  async send(text) {
    const { chat } = this.page.model();
    if (this.abort || (text === "" && (this.empty || chat))) return;
    this.abort = new AbortController();
    if (text !== "") this.add("you", text);
    const answer = this.add("model", "");
    this.box.value = "";
    this.show();
    announce("The model is writing.");
    const read = [...this.pending, ...(text === "" ? [] : [{ role: "user", content: text }])];
    const before = this.tokens;
    const guess = Math.round(read.reduce((sum, turn) => sum + turn.content.length, 0) / this.page.charactersPerToken());
    let [pieces, next, usage] = [0, null, null];
    try {
      for await (const chunk of events(chat ? "/v1/chat/completions" : "/v1/completions", this.body(read, chat), this.abort.signal)) {
        const choice = chunk.choices?.[0];
        const piece = choice?.delta?.content ?? choice?.text ?? "";
        if (piece !== "") {
          pieces += 1;
          this.extend(answer, piece);
          this.tokens = before + guess + pieces;
          this.page.changed(this);
        }
        next = chunk.state ?? next;
        usage = chunk.usage ?? usage;
      }
    } catch (error) {
      if (error.name !== "AbortError") {
        if (answer.text === "") this.undo(text);
        throw error;
      }
    } finally {
      this.abort = null;
      this.close(answer, read, next);
    }
    announce(next ? `Done: ${plural(usage?.completion_tokens ?? pieces, "token")}.` : "Stopped.");
    await this.page.stored(this);
  }

  body(read, chat) {
    const words = chat ? { messages: read } : { prompt: read.map((turn) => turn.content).join("") };
    const settings = { ...this.page.settings(), stream: true, stream_options: { include_usage: true }, store_state: true };
    return { model: this.page.model().name, ...words, ...settings, ...(this.state === null ? {} : { state: this.state }) };
  }

  /** An answer has ended. Without a state for it (it was stopped), the next request reads it again. */
  close(answer, read, next) {
    if (answer.text === "") this.turns = this.turns.filter((turn) => turn !== answer);
    if (next !== null) {
      this.state = next;
      this.pending = [];
    } else if (answer.text !== "") this.pending = [...read, { role: "assistant", content: answer.text }];
    this.write();
    this.show();
  }

  /** Its state was deleted: what is known of the text is read again with the next request. */
  lose() {
    this.state = null;
    this.hidden = 0;
    this.pending = this.turns.map(({ who, text }) => ({ role: who === "you" ? "user" : "assistant", content: text }));
    if (this.turns.length === 0) this.tokens = 0;
    this.write();
    this.show();
  }

  /** Nothing came back: the text returns into the box. */
  undo(text) {
    if (text !== "" && this.turns.at(-2)?.text === text) this.turns.splice(-2, 1);
    this.box.value = text;
  }

  // Showing

  add(who, text) {
    const turn = { who, text };
    this.turns.push(turn);
    this.write();
    return turn;
  }

  extend(turn, piece) {
    turn.text += piece;
    const bottom = this.paper.scrollHeight - this.paper.scrollTop - this.paper.clientHeight < 60;
    this.paper.lastChild.lastChild.textContent = turn.text;
    if (bottom) this.paper.scrollTop = this.paper.scrollHeight;
  }

  write() {
    const { chat } = this.page.model();
    this.paper.classList.toggle("chat", Boolean(chat));
    const rows = this.turns.map(({ who, text }) =>
      el("p", { class: who }, el("span", { class: "spoken" }, who === "you" ? "You: " : "Model: "), el("span", {}, text)),
    );
    if (this.hidden > 0) {
      const text = `Opened from a state that has read ${plural(this.hidden, "token")}. The memory holds them; the text itself is not kept by the server.`;
      rows.unshift(el("p", { class: "earlier" }, text));
    }
    if (rows.length === 0) {
      const hint = chat ? "Ask something." : "Begin a text.";
      const more = chat ? "The model answers, word by word." : "The model continues it, word by word.";
      rows.push(el("div", { class: "welcome" }, el("b", {}, hint), `${more} Fork it at any point and continue both ways.`));
    }
    this.paper.replaceChildren(...rows);
    this.paper.scrollTop = this.paper.scrollHeight;
  }

  show() {
    const writing = this.abort !== null;
    const { chat, state_bytes: size, constant_state: constant = true } = this.page.model();
    this.paper.classList.toggle("writing", writing);
    const focused = document.activeElement === (writing ? this.sendButton : this.stopButton);
    this.sendButton.hidden = writing;
    this.stopButton.hidden = !writing;
    if (focused) (writing ? this.stopButton : this.sendButton).focus();
    this.forkButton.disabled = writing || this.empty;
    this.sendButton.textContent = this.box.value === "" && !this.empty && !chat ? "Continue" : "Send";
    this.box.placeholder = this.empty ? (chat ? "Write a message" : "Write the beginning of a text") : "Write more";
    this.size.textContent = this.tokens > 0 ? `${plural(this.tokens, "token")}${constant ? ` in ${bytes(size)}` : ""}` : "";
  }
}
