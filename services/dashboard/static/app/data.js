// Where answers come from: a service that is asked, or the answers that an exported file carries.

const TOKEN = "bapo-token";
const API = "api/v1/";

/** The service wants a token, or another one. */
export class TokenNeeded extends Error {}
/** The service does not respond. */
export class Disconnected extends Error {}
/** The service answered that it cannot: the message is its own. */
export class Refused extends Error {}
/** The requested data are not included in the exported file. */
export class NotExported extends Error {}

/** The key of an answer: its endpoint and its query, sorted. As in services/dashboard/export.py. */
export function keyOf(endpoint, query = {}) {
  const pairs = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return pairs.length ? `${endpoint}?${new URLSearchParams(pairs.map(([k, v]) => [k, String(v)]).sort())}` : endpoint;
}

class Service {
  isExported = false;
  /** Folder of the run's tokens; "": on another machine; undefined: none is needed. */
  tokens = document.querySelector('meta[name="bapo-token"]')?.content;

  get needsToken() {
    return this.tokens !== undefined && !sessionStorage.getItem(TOKEN);
  }

  /** Names of the runs that the same service shows at ../NAME/. */
  runs = JSON.parse(document.querySelector('meta[name="bapo-runs"]')?.content ?? "[]");

  /** The answer of an endpoint, of this run or of another of `runs`. Throws TokenNeeded, Disconnected or Refused. Without a token where one is needed no
   * request is sent: a browser writes every refused request on its console. */
  async get(endpoint, query = {}, { signal, run = null } = {}) {
    const token = sessionStorage.getItem(TOKEN);
    if (this.needsToken) throw new TokenNeeded("");
    let reply;
    try {
      reply = await fetch((run === null ? "" : `../${encodeURIComponent(run)}/`) + API + keyOf(endpoint, query), { headers: token ? { Authorization: `Bearer ${token}` } : {}, signal });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Disconnected("the service does not respond");
    }
    if (reply.ok) return reply.json();
    const said = await reply.json().catch(() => ({ message: `status ${reply.status}` }));
    if (reply.status === 401 && token === sessionStorage.getItem(TOKEN)) sessionStorage.removeItem(TOKEN);
    if (reply.status === 401 || reply.status === 403) throw new TokenNeeded(said.message);
    throw new Refused(said.message);
  }

  /** Keep a token for as long as the tab is open. */
  useToken(token) {
    sessionStorage.setItem(TOKEN, token);
  }
}

class Exported {
  isExported = true;
  runs = [];

  constructor(answers) {
    this.answers = answers;
  }

  async get(endpoint, query = {}) {
    // An exported response always starts at the first record.
    const { since, measured, generation, ...rest } = query;
    const found = this.answers[keyOf(endpoint, rest)];
    if (found === undefined) throw new NotExported("these data are not included in this exported file; open the run with `bapo view RUN`");
    return found;
  }

  useToken() {}
}

const exported = document.getElementById("answers");
/** The one source of this page. */
export const source = exported ? new Exported(JSON.parse(exported.textContent)) : new Service();

const TICK_MS = 2000;
const SLOWEST_MS = 15000;

/**
 * Poll while the tab is seen.
 *
 * tick(source) -> whether there is more to fetch immediately. It may throw; onState is called with "live", "token", "disconnected",
 * "refused" or "exported", with the error. Returns {stop(), now()}.
 */
export function follow(tick, onState) {
  let timer = null;
  let failures = 0;
  let stopped = false;
  let running = false;

  async function once() {
    clearTimeout(timer);
    if (stopped || running) return;
    running = true;
    let pause = TICK_MS;
    try {
      if (await tick(source)) pause = 0;
      failures = 0;
      onState(source.isExported ? "exported" : "live", null);
    } catch (error) {
      failures += 1;
      pause = Math.min(SLOWEST_MS, TICK_MS * 2 ** (failures - 1));
      if (error instanceof TokenNeeded) onState("token", error);
      else if (error instanceof Disconnected) onState("disconnected", error);
      else onState("refused", error);
      if (error instanceof TokenNeeded || error instanceof NotExported) pause = null;
    }
    running = false;
    if (!stopped && pause !== null && !source.isExported && !document.hidden) timer = setTimeout(once, pause);
  }

  const wake = () => !document.hidden && once();
  document.addEventListener("visibilitychange", wake);
  once();
  return {
    now: once,
    stop() {
      stopped = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", wake);
    },
  };
}
