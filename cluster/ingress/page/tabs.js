/** Tabs as ARIA describes them: arrow keys, Home and End move, only the chosen tab is in the tab order. */

/** Make a list of tabs work. `onChoose` gets the id of the chosen tab. Returns the function that chooses one. */
export function makeTabs(list, onChoose) {
  const tabs = [...list.querySelectorAll("[role=tab]")];
  const choose = (tab) => {
    for (const one of tabs) {
      one.setAttribute("aria-selected", String(one === tab));
      one.tabIndex = one === tab ? 0 : -1;
    }
    onChoose(tab.id);
  };
  list.addEventListener("click", (event) => {
    const tab = event.target.closest("[role=tab]");
    if (tab) choose(tab);
  });
  list.addEventListener("keydown", (event) => {
    const now = tabs.indexOf(document.activeElement);
    const next = { ArrowRight: now + 1, ArrowLeft: now - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (now < 0 || next === undefined) return;
    event.preventDefault();
    const tab = tabs[(next + tabs.length) % tabs.length];
    tab.focus();
    choose(tab);
  });
  for (const one of tabs) one.tabIndex = one.getAttribute("aria-selected") === "true" ? 0 : -1;
  return (id) => choose(tabs.find((tab) => tab.id === id));
}
