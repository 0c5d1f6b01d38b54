"use strict";
// Filters rows, moves between cells with the arrow keys, and keeps the filter in the address.
const $ = (query, from = document) => [...from.querySelectorAll(query)];
const search = document.getElementById("search");
const profile = document.getElementById("profile");
const busy = document.getElementById("busy");
const count = document.getElementById("count");
document.documentElement.classList.add("js");

function filter() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const row of $("tr[data-words]")) {
    const fits = words.every((word) => row.dataset.words.includes(word))
      && (!profile.value || row.dataset.profiles.split(" ").includes(profile.value))
      && (!busy.checked || row.dataset.busy === "yes");
    row.hidden = !fits;
    shown += fits;
  }
  for (const body of $("tbody")) body.hidden = !$("tr[data-words]", body).some((row) => !row.hidden);
  for (const part of $("section.timeline")) {
    part.classList.toggle("empty", !$("tbody", part).some((body) => !body.hidden));
  }
  count.textContent = `${shown} rows`;
}

function changed() {
  filter();
  const state = new URLSearchParams();
  if (search.value) state.set("q", search.value);
  if (profile.value) state.set("profile", profile.value);
  if (busy.checked) state.set("open", "1");
  history.replaceState(null, "", state.size ? `#?${state}` : location.pathname + location.search);
}

function restore() {
  if (!location.hash.startsWith("#?")) return;
  const state = new URLSearchParams(location.hash.slice(2));
  search.value = state.get("q") ?? "";
  profile.value = state.get("profile") ?? "";
  busy.checked = state.has("open");
}

let opener = null;
function close() {
  if (!document.querySelector(".detail:target, .detail:has(:target)")) return;
  const place = [scrollX, scrollY];
  location.hash = "";
  changed();
  scrollTo(...place);
  if (opener) opener.focus({preventScroll: true});
}

function opened() {
  const detail = document.querySelector(".detail:target, .detail:has(:target)");
  if (detail) detail.focus({preventScroll: true});
}

document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link) return;
  if (link.matches(".close")) { event.preventDefault(); close(); }
  else if (link.matches("td a")) {
    event.preventDefault();
    opener = link;
    const place = [scrollX, scrollY];
    location.hash = link.hash;
    scrollTo(...place);
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") { close(); return; }
  if (event.key === "/" && document.activeElement !== search) {
    event.preventDefault();
    search.focus();
    return;
  }
  const cell = document.activeElement.closest("td");
  if (!cell || !event.key.startsWith("Arrow")) return;
  const row = cell.parentElement;
  const rows = $("tr[data-words]").filter((other) => !other.hidden && $("td a", other).length);
  const links = $("td a", row);
  const at = links.indexOf(document.activeElement);
  let next = null;
  if (event.key === "ArrowRight") next = links[at + 1];
  if (event.key === "ArrowLeft") next = links[at - 1];
  const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
  if (step) {
    const other = rows[rows.indexOf(row) + step];
    if (other) next = $("td a", other)[Math.min(at, $("td a", other).length - 1)];
  }
  if (next) { event.preventDefault(); next.focus(); next.scrollIntoView({block: "nearest", inline: "nearest"}); }
});

for (const field of [search, profile, busy]) field.addEventListener("input", changed);
addEventListener("hashchange", opened);
restore();
filter();
opened();
search.form.addEventListener("submit", (event) => event.preventDefault());
