// The shell: which page is shown, the theme, the token, and whether the service answers.

import { announce, el } from "bapo/app/dom.js";
import { source } from "bapo/app/data.js";
import { redrawAll } from "bapo/app/charts.js";

const content = document.getElementById("content");
const pages = new Map();
let shown = null;

const moduleNames = JSON.parse(document.getElementById("page-modules").textContent);
for (const module of await Promise.all(moduleNames.map((name) => import(name)))) {
  pages.set(module.default.name, module.default);
}
const runName = document.getElementById("run-name");
const thisRun = decodeURIComponent(location.pathname.split("/").filter(Boolean).at(-1) ?? "");
if (source.runs.length > 1) {
  const choose = el("select", { "aria-label": "Run", onchange: () => { location.href = `../${encodeURIComponent(choose.value)}/${location.hash}`; } },
    source.runs.map((name) => el("option", { value: name, selected: name === thisRun }, name)));
  runName.hidden = true;
  runName.after(choose);
}
const menu = [...pages.values()].filter((page) => page.order !== undefined).sort((a, b) => a.order - b.order);

/** "#/prompt/3f2a?step=4" -> {name: "prompt", path: ["3f2a"], params}. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [name, ...rest] = path.split("/").filter(Boolean).map(decodeURIComponent);
  return { name: name ?? menu[0].name, path: rest, params: new URLSearchParams(query) };
}

function addressOf(name, path, params) {
  const query = new URLSearchParams([...params].filter(([, value]) => value !== "")).toString();
  return `#/${[name, ...path].map(encodeURIComponent).join("/")}${query ? `?${query}` : ""}`;
}

/** What a page is given. */
const shell = {
  source,
  /** Other runs that the service shows. */
  otherRuns: source.runs.filter((name) => name !== thisRun),
  announce,
  setState: showConnection,
  setTitle(text) {
    runName.textContent = text;
    document.title = `${text} - BAPO`;
  },
  /** Change the address of the page that is shown: setParams({step: 40}). Without a new entry in the history. */
  setParams(changes) {
    const here = place();
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === undefined) here.params.delete(key);
      else here.params.set(key, String(value));
    }
    history.replaceState(null, "", addressOf(here.name, here.path, here.params));
  },
  linkTo: (name, path = [], params = {}) => addressOf(name, path, new URLSearchParams(params)),
};

function show() {
  const here = place();
  const page = pages.get(here.name);
  if (shown && page === shown.page && shown.view.update) {
    shown.view.update(here);
    return;
  }
  shown?.view.unmount();
  content.replaceChildren();
  for (const link of document.querySelectorAll("#menu a")) {
    if (link.dataset.page === here.name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (!page) {
    shown = null;
    content.append(el("h1", {}, "Page not found"), el("p", {}, "Available pages: ", menu.map((p) => p.title).join(", "), "."));
    return;
  }
  shown = { page, view: page.mount(content, shell, here) };
}

const WORDS = {
  live: "connected",
  running: "running",
  finished: "finished",
  records: "not running",
  exported: "offline copy",
  token: "token required",
  disconnected: "disconnected, retrying",
  refused: "error",
};

function showConnection(state, error) {
  const badge = document.getElementById("connection");
  if (badge.dataset.state !== state) {
    badge.dataset.state = state;
    badge.textContent = WORDS[state];
  }
  const problem = document.getElementById("problem");
  problem.hidden = state !== "refused" && state !== "disconnected";
  const words = state === "disconnected" ? "The service does not respond. The page shows the latest data received and updates when the service is back." : error?.message;
  if (!problem.hidden && problem.textContent !== words) problem.textContent = words;
  document.body.dataset.state = state;
  if (state === "token") askForToken(error.message);
}

function askForToken(message) {
  if (document.getElementById("token-form")) return;
  const input = el("input", { type: "password", id: "token", name: "token", autocomplete: "off", required: true, spellcheck: "false" });
  const form = el(
    "form",
    { id: "token-form", class: "card ask-token", "aria-labelledby": "token-title",
      onsubmit: (event) => {
        event.preventDefault();
        source.useToken(input.value.trim());
        form.remove();
        shown?.view.unmount();
        shown = null;
        show();
        content.focus();
      } },
    el("h2", { id: "token-title" }, "This run requires a token"),
    el("p", {}, "Paste the content of ", el("code", {}, `${source.tokens || "RUN/tokens"}/operator/token`), ". The token in ", el("code", {}, "viewer/token"), " there shows numbers, but no texts of prompts and responses. It is kept until this tab is closed."),
    el("p", {}, "Without a token, on the machine of the run: ", el("code", {}, "bapo view RUN"), ". In Docker Compose: ", el("code", {}, "docker compose run --rm -T --no-deps --entrypoint cat secrets /bapo/secrets/operator/token")),
    message ? el("p", { class: "problem", role: "alert" }, message) : null,
    el("label", { for: "token" }, "Token"),
    input,
    el("button", { type: "submit" }, "Show the run"),
  );
  if (source.needsToken) { // the figures would never load
    shown?.view.unmount();
    shown = null;
    content.replaceChildren();
  }
  content.prepend(form);
  input.focus();
}

// -- theme

const THEMES = ["system", "light", "dark"];

function useTheme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `Theme: ${name}`;
  redrawAll();
}

/** Storage is refused to files in some browsers: the theme then lasts as long as the page. */
function remembered(value) {
  try {
    if (value !== undefined) localStorage.setItem("bapo-theme", value);
    return localStorage.getItem("bapo-theme");
  } catch {
    return value ?? null;
  }
}

let theme = THEMES.includes(remembered()) ? remembered() : "system";
document.getElementById("theme").addEventListener("click", () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  remembered(theme);
  useTheme(theme);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redrawAll);

document.querySelector("a.skip").addEventListener("click", (event) => {
  event.preventDefault();
  content.focus();
});
document.getElementById("menu").append(
  ...menu.map((page) => el("li", {}, el("a", { href: `#/${page.name}`, "data-page": page.name }, page.title))),
);
useTheme(theme);
addEventListener("hashchange", show);
show();
document.body.dataset.ready = "";
