// The server that this page came from. Addresses are relative, so that a proxy may add a path.

const LOST = "the connection was lost in the middle of the answer";
const NO_ANSWER = "the server does not answer";
const NO_KEY = "the API key is missing or wrong; enter it under Settings";

export class ServerError extends Error {
  constructor(message, status = null) {
    super(message);
    this.status = status;
  }
}

export class Server {
  key = "";

  /** Samples of all metrics by name: lists of {labels, value}. */
  async metrics() {
    return parseMetrics(await (await this.#ask("metrics")).text());
  }

  /** Yield the events of a chat stream; what each round drafted is among them. */
  async *chat(fields, signal) {
    const body = {
      ...fields,
      stream: true,
      stream_options: { include_usage: true, include_rounds: true },
    };
    const response = await this.#ask("v1/chat/completions", {
      method: "POST",
      body: JSON.stringify(body),
      signal,
    });
    for await (const line of lines(response.body)) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice("data: ".length);
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new ServerError(event.error.message);
      yield event;
    }
    throw new ServerError(LOST);
  }

  async #ask(path, options = {}) {
    const headers = { "content-type": "application/json" };
    if (this.key) headers.authorization = `Bearer ${this.key}`;
    const response = await fetch(path, { ...options, headers }).catch(saying(NO_ANSWER));
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    const message = body?.error?.message ?? `the server answered ${response.status}`;
    // What the server says of keys is for those who write requests themselves.
    throw new ServerError(response.status === 401 ? NO_KEY : message, response.status);
  }
}

/** Each browser has words of its own for a connection that fails. */
function saying(message) {
  return (error) => {
    throw error.name === "AbortError" ? error : new ServerError(message);
  };
}

async function* lines(body) {
  const decoder = new TextDecoder();
  const reader = body.getReader();
  let held = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch(saying(LOST));
      if (done) return;
      held += decoder.decode(value, { stream: true });
      const complete = held.split("\n");
      held = complete.pop();
      yield* complete;
    }
  } finally {
    await reader.cancel().catch(() => {});
  }
}

function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([^#{\s]+)(?:\{(.*)\})? (\S+)$/.exec(line);
    if (!match) continue;
    const [, name, list = "", value] = match;
    const labels = {};
    for (const [, key, label] of list.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[key] = label.replaceAll(/\\(.)/g, "$1");
    }
    if (!found.has(name)) found.set(name, []);
    found.get(name).push({ labels, value: Number(value) });
  }
  return found;
}
