// The live view of the scheduler's groups. Rates are the differences of two looks.
import { ask } from "/page/api.js";

const EVERY_MS = 1000;
const $ = (id) => document.getElementById(id);
let before = null;

const sum = (groups, field) => groups.reduce((total, group) => total + group[field], 0);

function row(group) {
  const cells = [group.name, group.ready ? "ready" : "not ready", group.running, group.waiting];
  const line = document.createElement("tr");
  for (const cell of cells) line.insertCell().textContent = cell;
  const meter = document.createElement("meter");
  meter.value = group.kv_usage;
  const percent = `${Math.round(group.kv_usage * 100)} %`;
  meter.setAttribute("aria-label", `KV cache of ${group.name} in use`);
  line.insertCell().append(meter, ` ${percent}`);
  return line;
}

function show(status) {
  const { groups } = status;
  const now = { at: performance.now(), tokens: sum(groups, "generation_tokens") };
  $("running").textContent = sum(groups, "running");
  $("waiting").textContent = status.waiting + sum(groups, "waiting");
  if (before && now.tokens >= before.tokens) {
    $("rate").textContent = ((now.tokens - before.tokens) / ((now.at - before.at) / 1000)).toFixed(0);
  }
  const asked = sum(groups, "prompt_tokens");
  $("hits").textContent = asked ? `${Math.round((100 * sum(groups, "cached_tokens")) / asked)} %` : "–";
  $("groups").replaceChildren(...groups.map(row));
  before = now;
}

function health(state, words) {
  $("health").dataset.state = state;
  $("health").textContent = words;
}

// `changed` is called whenever the gateway has become reachable again.
export async function watch(changed) {
  let good = false;
  for (;;) {
    if (!document.hidden) {
      try {
        show(await (await ask("/status")).json());
        health("good", "ready");
        $("status-error").hidden = true;
        if (!good) await changed();
        good = true;
      } catch (error) {
        good = false;
        before = null;
        health("bad", "not ready");
        $("status-error").textContent = error.message;
        $("status-error").hidden = false;
      }
    }
    await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
  }
}
