"use strict";
for (const group of document.querySelectorAll(".slas")) {
  const slider = group.querySelector("input"), cards = group.querySelectorAll(".answer");
  const shown = group.querySelector("output");
  slider.addEventListener("input", () => {
    for (const card of cards) {
      card.hidden = card.dataset.at !== slider.value;
      if (!card.hidden) shown.textContent = card.dataset.sla;
    }
    slider.setAttribute("aria-valuetext", shown.textContent);
  });
  group.querySelector(".slider").hidden = false;
}
for (const command of document.querySelectorAll("pre.command")) {
  const button = document.createElement("button");
  button.textContent = "Copy";
  button.addEventListener("click", () => {
    getSelection().selectAllChildren(command);
    document.execCommand("copy");
    button.textContent = "Copied";
  });
  command.after(button);
}
