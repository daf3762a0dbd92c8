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
for (const figure of document.querySelectorAll("[data-readings]")) {
  const { box, B, S, steps } = JSON.parse(figure.dataset.readings), image = figure.querySelector("img");
  const caption = figure.appendChild(document.createElement("figcaption"));
  const along = (value, [low, high]) => Math.log(value / low) / Math.log(high / low);
  const ms = (value) => Number(value.toPrecision(4));
  caption.textContent = "Point at the map to read a step.";
  image.addEventListener("pointermove", (event) => {
    const { left, bottom, width, height } = image.getBoundingClientRect();
    const x = ((event.clientX - left) / width - box[0]) / box[2];
    const y = ((bottom - event.clientY) / height - box[1]) / box[3];
    const distance = (step) => Math.hypot(along(step[0], B) - x, along(step[1], S) - y);
    const [b, s, T, low, high, level, measured, rows] = steps.reduce((a, c) => distance(c) < distance(a) ? c : a);
    caption.textContent = `B = ${b}, S = ${s}: predicted ${ms(T)} ms`
      + (low === null ? "" : `, ${level} % of steps ${ms(low)} to ${ms(high)} ms`)
      + (measured === null ? ", not measured" : `, measured ${ms(measured)} ms (${rows} steps)`);
  });
}
