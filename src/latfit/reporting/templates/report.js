"use strict";
for (const deck of document.querySelectorAll(".deck")) {
  const sliders = [...deck.querySelectorAll(".slider input")], cards = deck.querySelectorAll(".answer");
  const outputs = [...deck.querySelectorAll(".slider output")], requested = outputs.map((each) => each.textContent);
  sliders.forEach((slider, axis) => {
    slider.addEventListener("input", () => {
      sliders.forEach((other, i) => { if (i !== axis) other.value = other.defaultValue; });
      const key = slider.value === slider.defaultValue ? "" : `${axis}:${slider.value}`;
      outputs.forEach((output, i) => { output.textContent = requested[i]; });
      for (const card of cards) {
        card.hidden = card.dataset.key !== key;
        if (key && !card.hidden) outputs[axis].textContent = card.dataset.at;
      }
      slider.setAttribute("aria-valuetext", outputs[axis].textContent);
    });
    slider.closest(".slider").hidden = false;
  });
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
