// The page: a conversation with the server, decoded drafted, plain, or both at once.

import { Answer, counted, make, shortNumber } from "./answer.js";
import { AnswerFigures, ServerFigures } from "./figures.js";
import { Server } from "./server.js";

const BUSY_PAUSE = 500; // milliseconds between two looks at the metrics
const IDLE_PAUSE = 3000;
const NEAR_END = 120; // pixels: who has scrolled up further is left there

const place = (id) => document.getElementById(id);
const server = new Server();
const answerFigures = new AnswerFigures();
const serverFigures = new ServerFigures();
let messages = [];
let needsKey = false; // it makes no sense to ask on until there is another one
let asking = null; // the AbortController of the prompt that is being answered
let lookNow = () => {}; // ends the pause between two looks at the metrics

function isAtEnd() {
  const { scrollHeight, scrollTop, clientHeight } = document.documentElement;
  return scrollHeight - scrollTop - clientHeight < NEAR_END;
}

function scrollToEnd() {
  document.documentElement.scrollTop = document.documentElement.scrollHeight;
}

function say(text) {
  place("status").textContent = text;
}

function fields(conversation) {
  const temperature = place("temperature").valueAsNumber;
  const maxTokens = place("max-tokens").valueAsNumber;
  return {
    messages: [...conversation],
    temperature: Number.isNaN(temperature) ? 0 : temperature,
    ...(Number.isNaN(maxTokens) ? {} : { max_tokens: maxTokens }),
    // Both sides of a comparison must draw the same numbers.
    seed: crypto.getRandomValues(new Uint32Array(1))[0],
  };
}

async function fetchAnswer(answer, request, isDrafted, together) {
  try {
    const body = isDrafted ? request : { ...request, num_draft_tokens: 0 };
    for await (const event of server.chat(body, asking.signal)) {
      const follow = isAtEnd();
      answer.take(event, performance.now());
      answerFigures.show(answer, isDrafted, together);
      if (follow) scrollToEnd();
    }
    answer.end();
  } catch (error) {
    answer.end(error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}.`);
  }
  if (isDrafted) answerFigures.add(answer);
}

function verdict([drafted, plain]) {
  // What is shown, as the content leaves out the thinking.
  const one = drafted.text.textContent;
  const other = plain.text.textContent;
  if (one === other) return make("p", "verdict same", "✓ Both texts are the same.");
  let at = 0;
  while (one[at] === other[at]) at += 1;
  return make("p", "verdict different", `✗ The texts differ from character ${at + 1} on.`);
}

async function ask(prompt, conversation) {
  const mode = document.querySelector("input[name=mode]:checked").value;
  const sides = { drafted: [true], plain: [false], both: [true, false] }[mode];
  const together = sides.length > 1;
  const answers = sides.map((isDrafted) => new Answer(isDrafted ? "drafted" : "plain", prompt));
  const row = make("div", together ? "answers two" : "answers");
  row.append(...answers.map((answer) => answer.element));
  const turn = make("li", "turn");
  const asked = make("p", "asked", prompt);
  asked.dir = "auto";
  turn.append(asked, row);
  place("welcome").hidden = true;
  place("turns").append(turn);
  scrollToEnd();

  conversation.push({ role: "user", content: prompt });
  const request = fields(conversation);
  say("Answering.");
  await Promise.all(
    answers.map((answer, i) => fetchAnswer(answer, request, sides[i], together)),
  );
  finish(turn, answers, conversation);
}

function finish(turn, answers, conversation) {
  const [answer] = answers;
  const follow = isAtEnd();
  const parts = [`Answered: ${counted(answer.numTokens, "token")}`];
  if (answer.tally.numRounds) parts.push(`${shortNumber(answer.tally.acceptanceLength, 2)} per round`);
  const areComplete = answers.every((one) => one.isComplete);
  if (areComplete && answers.length > 1) {
    const found = verdict(answers);
    turn.append(found);
    parts.push(found.textContent);
  }
  if (areComplete) say(parts.join(", "));
  // What was not answered is not part of the conversation.
  if (answer.content) conversation.push({ role: "assistant", content: answer.content });
  else conversation.pop();
  if (follow) scrollToEnd();
}

async function submit() {
  const prompt = place("prompt").value.trim();
  if (!prompt || asking) return;
  asking = new AbortController();
  setBusy(true);
  place("prompt").value = "";
  const conversation = messages;
  try {
    await ask(prompt, conversation);
  } finally {
    if (conversation === messages) {
      asking = null;
      setBusy(false);
    }
  }
}

function setBusy(isBusy) {
  const hadFocus = [place("send"), place("stop")].includes(document.activeElement);
  place("send").hidden = isBusy;
  place("stop").hidden = !isBusy;
  if (hadFocus) place(isBusy ? "stop" : "prompt").focus();
  // An answer may take less than an idle pause.
  lookNow();
}

function restart() {
  asking?.abort();
  asking = null;
  messages = [];
  place("turns").replaceChildren();
  place("welcome").hidden = false;
  setBusy(false);
  say("A new conversation.");
  place("prompt").focus();
}

async function watchServer() {
  for (;;) {
    if (!document.hidden && !needsKey) {
      try {
        const metrics = await server.metrics();
        serverFigures.show(metrics, performance.now());
        // A server that was started again may have another model.
        place("model").textContent = metrics.get("vllm:num_requests_running")[0].labels.model_name;
      } catch (error) {
        needsKey = error.status === 401;
        if (needsKey) place("settings").open = true;
        serverFigures.fail();
        place("model").textContent = error.message;
      }
    }
    await new Promise((done) => {
      lookNow = done;
      setTimeout(done, asking ? BUSY_PAUSE : IDLE_PAUSE);
    });
  }
}

function connect() {
  place("ask").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  place("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  place("stop").addEventListener("click", () => asking?.abort());
  place("restart").addEventListener("click", restart);
  place("key").addEventListener("change", () => {
    server.key = place("key").value.trim();
    needsKey = false;
    lookNow();
  });
  for (const button of document.querySelectorAll(".samples button")) {
    button.addEventListener("click", () => {
      place("prompt").value = button.textContent;
      submit();
    });
  }
  const form = place("ask");
  new ResizeObserver(() => {
    document.documentElement.style.setProperty("--form-height", `${form.offsetHeight}px`);
  }).observe(form);
  // The figures have a column of their own where there is room for one, and fold away elsewhere.
  const wide = matchMedia("(min-width: 56.01rem)");
  const unfold = () => {
    place("figures").open = wide.matches;
  };
  wide.addEventListener("change", unfold);
  unfold();
}

connect();
watchServer();
