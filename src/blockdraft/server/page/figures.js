// The figures beside the conversation.

import { make, shortNumber } from "./answer.js";
import { Tally } from "./tally.js";

const WINDOW = 5000; // milliseconds over which the server's rates are taken
const TOKENS = "vllm:generation_tokens_total";
const BAR_WIDTH = 5; // rem of a share of 1

const place = (id) => document.getElementById(id);

function put(id, text) {
  place(id).textContent = text;
}

/** What the answers of this page tell of themselves. */
export class AnswerFigures {
  #finished = new Tally(); // of the answers that have ended
  #arriving = null; // of the drafted answer that has not
  #speeds = { drafted: null, plain: null }; // of the last answers: {value, prompt, together}

  /** Show an answer that arrives, or has ended. */
  show(answer, isDrafted, together) {
    if (answer.speed !== null) {
      const speed = { value: answer.speed, prompt: answer.prompt, together };
      this.#speeds[isDrafted ? "drafted" : "plain"] = speed;
    }
    if (isDrafted || !together) {
      put("tau", shortNumber(answer.tally.acceptanceLength, 2));
      put("depth", shortNumber(answer.tally.depth));
      put("stalls", String(answer.tally.numStalls));
    }
    this.#showSpeeds();
    if (isDrafted) this.#schedule(answer.tally);
  }

  #showSpeeds() {
    const { drafted, plain } = this.#speeds;
    put("drafted-speed", shortNumber(drafted?.value ?? null));
    put("plain-speed", shortNumber(plain?.value ?? null));
    const isSame = drafted && plain && drafted.prompt === plain.prompt;
    const isComparable = isSame && drafted.together === plain.together;
    put("speedup", isComparable ? `${shortNumber(drafted.value / plain.value, 2)}×` : "–");
    put("speed-note", speedNote(drafted, isSame, isComparable));
  }

  /** Count an answer that has ended. */
  add(answer) {
    this.#finished.merge(answer.tally);
    this.#arriving = null;
    this.#fillTables();
  }

  /** Tables are written once a frame, however fast an answer arrives. */
  #schedule(tally) {
    const isScheduled = this.#arriving !== null;
    this.#arriving = tally;
    if (!isScheduled) requestAnimationFrame(() => this.#arriving && this.#showArriving());
  }

  #showArriving() {
    this.#fillTables(this.#arriving);
    this.#arriving = null;
  }

  #fillTables(arriving = new Tally()) {
    const sum = new Tally();
    for (const tally of [this.#finished, arriving]) sum.merge(tally);
    fill("by-position", sum.byPosition.map((counts, i) => [String(i + 1), counts]));
    fill("by-kind", [...sum.byKind].sort((a, b) => b[1].tried - a[1].tried));
  }
}

function speedNote(drafted, isSame, isComparable) {
  if (!isSame) return "To compare, send the same prompt once drafted and once plain.";
  if (!isComparable) return "Not comparable: one ran alone, the other together with a second answer.";
  return drafted.together
    ? "Both ran concurrently and shared the engine’s steps: neither speed is what it would be alone."
    : "";
}

function fill(id, rows) {
  const made = rows.map(([name, { tried, kept }]) => {
    const head = make("th", "", name);
    head.scope = "row";
    const bar = make("i");
    bar.style.width = `${(BAR_WIDTH * kept) / tried}rem`;
    const cell = make("td");
    const inner = make("div", "bar");
    inner.append(bar, make("span", "faint", `${kept}/${tried}`));
    cell.append(inner);
    const row = make("tr");
    row.append(head, cell, make("td", "", `${Math.round((100 * kept) / tried)} %`));
    return row;
  });
  place(id).tBodies[0].replaceChildren(...made);
}

/** What the server's metrics tell, over the last seconds. */
export class ServerFigures {
  #past = []; // {at, metrics}

  show(metrics, now) {
    const numTokens = total(metrics, TOKENS);
    // Counters that shrink are those of a server that was started again.
    if (this.#past.length && numTokens < total(this.#past.at(-1).metrics, TOKENS)) this.#past = [];
    this.#past.push({ at: now, metrics });
    while (this.#past.length > 2 && this.#past[1].at <= now - WINDOW) this.#past.shift();
    const running = total(metrics, "vllm:num_requests_running");
    put("load", `${running}, ${total(metrics, "vllm:num_requests_waiting")}`);
    put("pages", `${shortNumber(100 * total(metrics, "vllm:kv_cache_usage_perc"))} %`);
    put("server-stalls", String(total(metrics, "blockdraft:stalls_total")));
    this.#showRates(now);
  }

  #showRates(now) {
    const since = this.#past[0];
    const latest = this.#past.at(-1).metrics;
    const grown = (name, weight) => total(latest, name, weight) - total(since.metrics, name, weight);
    const numPasses = grown("blockdraft:decode_passes_total");
    const drafted = grown("blockdraft:decode_passes_total", (labels) => Number(labels.depth));
    const perPass = (value) => (numPasses ? value / numPasses : null);
    const seconds = (now - since.at) / 1000;
    put("server-speed", shortNumber(seconds > 0 ? grown(TOKENS) / seconds : null));
    put("server-tau", shortNumber(perPass(grown("blockdraft:decode_tokens_total")), 2));
    put("server-depth", shortNumber(perPass(drafted)));
  }

  /** The server does not tell. */
  fail() {
    this.#past = [];
    for (const figure of document.querySelectorAll("#server dd")) figure.textContent = "–";
  }
}

function total(metrics, name, weight = () => 1) {
  const samples = metrics.get(name) ?? [];
  return samples.reduce((sum, sample) => sum + sample.value * weight(sample.labels), 0);
}
