// Texts whose contrast with all grounds beneath them is below WCAG AA: 4.5 : 1, or 3 : 1 for large text.
() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const parse = (css) => { canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = css; canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; return [r, g, b, a / 255]; };
  const over = (top, under) => [0, 1, 2].map(i => top[i] * top[3] + under[i] * (1 - top[3])).concat(1);
  const light = (c) => { const f = c.slice(0, 3).map(v => { v /= 255; return v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4; });
    return .2126 * f[0] + .7152 * f[1] + .0722 * f[2]; };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const e = walker.currentNode.parentElement;
    const isHidden = !e.checkVisibility() || e.closest('.unseen, .skip, noscript, :disabled');
    if (isHidden || !walker.currentNode.textContent.trim()) continue;
    const layers = [];
    for (let up = e; up; up = up.parentElement) layers.push(parse(getComputedStyle(up).backgroundColor));
    const ground = layers.reverse().reduce((under, top) => over(top, under), [255, 255, 255, 1]);
    const style = getComputedStyle(e), size = parseFloat(style.fontSize);
    const [a, b] = [light(over(parse(style.color), ground)), light(ground)];
    const ratio = (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    if (ratio < (size >= 24 || (size >= 18.7 && style.fontWeight >= 700) ? 3 : 4.5)) found.push([e.textContent.slice(0, 40), e.className, ratio.toFixed(2)]);
  }
  return found;
}
