// One answer while it arrives. A model's text is put on the page as text, never as markup.

import { Tally } from "./tally.js";

const HINT = matchMedia("(hover: none)").matches
  ? "Tap the text to see its rounds."
  : "Point at the text, or focus it and use ← and →, to see its rounds.";
let numAnswers = 0;

export function make(name, className = "", text = "") {
  const element = document.createElement(name);
  if (className) element.className = className;
  element.textContent = text;
  return element;
}

export function shortNumber(value, digits = 1) {
  return value === null || !Number.isFinite(value) ? "–" : value.toFixed(digits);
}

/** A number with its noun, whose plural ends in s. */
export function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

export class Answer {
  content = ""; // as other clients get it
  tally = new Tally();
  rounds = [];
  kinds = null;
  isComplete = false;
  #isCutOff = false;
  #firstAt = null;
  #lastAt = null;
  #speed = null;
  #focused = null;

  constructor(title, prompt) {
    numAnswers += 1;
    this.prompt = prompt;
    this.element = make("article", "answer");
    this.element.setAttribute("aria-label", `Answer, ${title}`);
    this.element.setAttribute("aria-busy", "true");
    this.text = make("div", "text");
    this.text.dir = "auto"; // a script that is written from right to left begins there
    this.text.tabIndex = 0;
    this.text.setAttribute("role", "group");
    this.text.setAttribute("aria-label", "Text; the arrow keys move from round to round");
    this.detail = make("p", "detail", HINT);
    this.detail.id = `detail-${numAnswers}`;
    this.sums = make("p", "sums");
    this.element.append(make("h2", "", title), this.text, this.detail, this.sums);
    this.text.addEventListener("keydown", (event) => this.#move(event));
    for (const name of ["pointerover", "focusin"]) {
      this.text.addEventListener(name, (event) => this.#show(event.target.closest(".round")));
    }
  }

  /** Take an event of the stream. */
  take(event, now) {
    for (const choice of event.choices) {
      this.content += choice.delta.content ?? "";
      for (const round of choice.rounds ?? []) this.#addRound(round, now);
      this.kinds = choice.token_kinds ?? this.kinds;
      this.#isCutOff ||= choice.finish_reason === "length";
    }
    // The server's own time is better than that of arrivals here.
    this.#speed = event.metrics?.tokens_per_second ?? this.#speed;
    this.#sumUp();
  }

  #addRound(round, now) {
    this.#firstAt ??= now;
    this.#lastAt = now;
    this.rounds.push(round);
    if (this.rounds.length > 1) this.tally.add(round);
    if (!round.tokens.some((text) => text)) return;
    const element = make("span", "round");
    element.tabIndex = -1;
    element.dataset.index = this.rounds.length - 1;
    element.classList.toggle("stalled", round.follows_stall);
    const numKept = round.num_accepted;
    round.tokens.forEach((text, index) => {
      if (text) element.append(make("span", index < numKept ? "token drafted" : "token", text));
    });
    this.text.append(element);
  }

  /** Nothing follows. */
  end(fault = "") {
    this.isComplete = !fault;
    this.element.setAttribute("aria-busy", "false");
    if (fault) {
      const note = make("p", "fault", fault);
      note.setAttribute("role", "alert");
      this.element.append(note);
    }
    if (this.kinds) this.tally.addKinds(this.rounds, this.kinds);
  }

  get numTokens() {
    return this.rounds.reduce((sum, round) => sum + round.tokens.length, 0);
  }

  /** Tokens a second after the first round; null as long as there is no second one. */
  get speed() {
    if (this.#speed !== null) return this.#speed;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    return seconds > 0 ? this.tally.numTokens / seconds : null;
  }

  #sumUp() {
    const parts = [`${counted(this.numTokens, "token")}${this.#isCutOff ? ", then cut off" : ""}`];
    const tau = this.tally.acceptanceLength;
    if (tau !== null) parts.push(`${shortNumber(tau, 2)} per round`);
    if (this.speed !== null) parts.push(`${shortNumber(this.speed)} per second`);
    const { numStalls } = this.tally;
    if (numStalls) parts.push(counted(numStalls, "stall"));
    this.sums.textContent = parts.join(" · ");
  }

  #show(element) {
    if (!element) return;
    this.detail.textContent = describe(this.rounds, Number(element.dataset.index));
    if (element !== document.activeElement) return;
    // Only the focused round has a role: a reader of the whole text hears text, not groups.
    for (const name of ["role", "aria-label", "aria-describedby"]) {
      this.#focused?.removeAttribute(name);
    }
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", element.textContent);
    element.setAttribute("aria-describedby", this.detail.id);
    this.#focused = element;
  }

  #move(event) {
    const all = this.text.children;
    const at = [...all].indexOf(document.activeElement);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    all[Math.max(0, Math.min(next, all.length - 1))]?.focus();
  }
}

function describe(rounds, index) {
  const round = rounds[index];
  const stall = round.follows_stall ? "; it came after a stall" : "";
  if (index === 0) return `Prefill: the target’s first token${stall}.`;
  const name = `Round ${index} of ${rounds.length - 1}`;
  if (!round.num_drafted) return `${name}: nothing drafted, one token from the target${stall}.`;
  const numKept = round.num_accepted;
  const own = round.tokens.length > numKept ? ", then one token from the target" : "";
  return `${name}: ${round.num_drafted} drafted, ${numKept} accepted${own}${stall}.`;
}
