// Starts the page: the key, the scheme of colours, the playground and the live view.
import { key } from "/page/api.js";
import * as chat from "/page/chat.js";
import * as status from "/page/status.js";

const THEME = "lockstep-theme";
const root = document.documentElement;

function theme(name) {
  root.dataset.theme = name;
  localStorage.setItem(THEME, name);
}

const saved = localStorage.getItem(THEME);
if (saved === "light" || saved === "dark") root.dataset.theme = saved;
document.getElementById("theme").addEventListener("click", () => {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  theme(dark ? "light" : "dark");
});

const field = document.getElementById("key");
field.value = key.get();
field.addEventListener("input", () => key.set(field.value.trim()));

chat.start();
status.watch(chat.models);
