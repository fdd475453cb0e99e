// The playground: one conversation, its parameters, and what an answer took.
import { ask, events } from "/page/api.js";

const $ = (id) => document.getElementById(id);
let messages = []; // as the API has them, without the system message
let running = null; // AbortController of the answer that is under way

function show(kind, text = "") {
  const item = document.createElement("li");
  item.className = kind;
  const thinking = document.createElement("span");
  thinking.className = "thinking";
  const content = document.createElement("span");
  content.textContent = text;
  item.append(thinking, content);
  $("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return { item, thinking, content };
}

const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));

function request() {
  const system = $("system").value.trim();
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...messages],
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
    ...($("stream").checked ? { stream: true, stream_options: { include_usage: true } } : {}),
  };
}

// Seconds to the first token, and tokens a second after it; of an answer that came as a whole, over all of its time.
function figures(started, first, ended, usage) {
  const words = [];
  if (first !== null) words.push(`first token ${((first - started) / 1000).toFixed(2)} s`);
  if (usage) {
    const [tokens, since] = first === null ? [usage.completion_tokens, started] : [usage.completion_tokens - 1, first];
    const seconds = (ended - since) / 1000;
    if (tokens > 0 && seconds > 0) words.push(`${(tokens / seconds).toFixed(1)} tokens/s`);
    words.push(`${usage.prompt_tokens} + ${usage.completion_tokens} tokens`);
  }
  $("figures").textContent = words.join(" · ");
}

async function answer(shown, signal) {
  const started = performance.now();
  let first = null;
  let usage = null;
  const body = request();
  const response = await ask("/v1/chat/completions", { body, signal });
  const add = (delta) => {
    shown.thinking.textContent += delta.reasoning_content ?? "";
    shown.content.textContent += delta.content ?? "";
  };
  if (!body.stream) {
    const whole = await response.json();
    add(whole.choices[0].message);
    usage = whole.usage;
  } else {
    for await (const event of events(response)) {
      const delta = event.choices[0]?.delta ?? {};
      if (first === null && (delta.content || delta.reasoning_content)) first = performance.now();
      add(delta);
      usage = event.usage ?? usage;
      shown.item.parentElement.scrollTop = shown.item.parentElement.scrollHeight;
    }
  }
  figures(started, first, performance.now(), usage);
}

async function send(submitted) {
  submitted.preventDefault();
  const text = $("prompt").value;
  if (running || !text.trim()) return;
  $("prompt").value = "";
  $("figures").textContent = "";
  const conversation = messages; // which "New chat" may exchange before the answer ends
  conversation.push({ role: "user", content: text });
  show("user", text);
  const shown = show("assistant");
  shown.item.classList.add("busy");
  running = new AbortController();
  $("send").disabled = true;
  $("stop").disabled = false;
  try {
    await answer(shown, running.signal);
  } catch (error) {
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    shown.item.classList.remove("busy");
    if (shown.content.textContent) conversation.push({ role: "assistant", content: shown.content.textContent });
    else conversation.pop(); // nothing was answered: the message may be sent again
    if (!shown.item.textContent) shown.item.remove();
    running = null;
    $("send").disabled = false;
    $("stop").disabled = true;
    $("prompt").focus();
  }
}

function clear() {
  running?.abort();
  messages = [];
  $("messages").replaceChildren();
  $("figures").textContent = "";
  $("prompt").focus();
}

export async function models() {
  const { data } = await (await ask("/v1/models")).json();
  const chosen = $("model").value;
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  if (data.some(({ id }) => id === chosen)) $("model").value = chosen;
}

export function start() {
  $("form").addEventListener("submit", send);
  $("stop").addEventListener("click", () => running?.abort());
  $("clear").addEventListener("click", clear);
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      $("form").requestSubmit();
    }
    if (event.key === "Escape") running?.abort();
  });
}
