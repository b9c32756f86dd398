/** Starts the page: views, colours, the API key, and what the server is. */

import { read, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { Cluster } from "./cluster.js";
import { Race } from "./race.js";
import { Receipts } from "./receipt.js";
import { makeTabs } from "./tabs.js";
import { element } from "./transcript.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];

const page = { model: "", method: "", settings: { grpc_port: 9000, demands_key: false, can_kill_drafter: false } };

/** Show an error with buttons (label → function), or nothing. A missing or wrong key opens the dialog. */
function report(text, status, actions = {}) {
  $("notice-text").textContent = text;
  $("notice-actions").replaceChildren(
    ...Object.entries(actions).map(([label, act]) => {
      const button = element("button", "small", label);
      button.type = "button";
      button.addEventListener("click", act);
      return button;
    }),
  );
  $("notice").hidden = !text;
  if (status === 401) askForKey();
}

function askForKey() {
  if ($("key-dialog").open) return;
  $("key").value = "";
  $("key-dialog").showModal();
}

const chat = new Chat(page, report);
const cluster = new Cluster(report);
const race = new Race(page, report);
const narrow = matchMedia("(max-width: 720px)");
const unfold = () => ($("options").open = !narrow.matches);
narrow.addEventListener("change", unfold);
unfold();

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || $("key-dialog").open) return;
  chat.stop();
  race.stop();
});
const receipts = new Receipts(report, (body, seed, text) => {
  show("tab-chat");
  chat.replay(body, seed, text);
});
chat.onReceipt = (bundle) => {
  receipts.show(bundle);
  show("tab-receipt");
  $("verify").focus();
};

const show = makeTabs($("views"), (id) => {
  for (const view of document.querySelectorAll(".view")) view.hidden = view.getAttribute("aria-labelledby") !== id;
  if (id === "tab-cluster") cluster.start();
  else cluster.stop();
});

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const name = { auto: "as the system", light: "light", dark: "dark" }[theme];
  $("theme").textContent = { auto: "◐ Auto", light: "○ Light", dark: "● Dark" }[theme];
  $("theme").setAttribute("aria-label", `Colours: ${name}`);
}

$("theme").addEventListener("click", () => {
  const now = THEMES.indexOf(document.documentElement.dataset.theme ?? "auto");
  setTheme(THEMES[(now + 1) % THEMES.length]);
});

$("key-button").addEventListener("click", askForKey);
$("key-cancel").addEventListener("click", () => $("key-dialog").close("cancel"));
$("key-dialog").addEventListener("close", () => {
  if ($("key-dialog").returnValue !== "ok" || !$("key").value.trim()) return;
  setKey($("key").value);
  $("key").value = "";
  report("");
  learn();
});

/** Learn the settings of the page, the model and the drafting method. */
async function learn() {
  try {
    page.settings = await read("page/settings.json");
    $("key-button").hidden = !page.settings.demands_key;
    const card = (await read("v1/models")).data[0];
    page.model = card.id;
    page.method = card.draft_method === "none" ? "" : card.draft_method;
    $("model").textContent = card.lossless ? card.id : `${card.id} (lossy)`;
    $("method").textContent = page.method ? `drafts: ${page.method}` : "no drafts";
    $("method").hidden = false;
  } catch (error) {
    report(error.message, error.status, error.isAway ? { "Try again": () => report("") || learn() } : {});
  }
  chat.refresh();
}

learn();
