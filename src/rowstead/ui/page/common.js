// What both views of the page use. Text is only ever set as text, never as markup.

export const by = (id) => document.getElementById(id);

export function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'class') node.className = value;
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null));
  return node;
}

export function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// numbers as people read them

export function count(value) {
  if (value >= 1e12) return trim(value / 1e12) + ' T';
  if (value >= 1e9) return trim(value / 1e9) + ' G';
  if (value >= 1e6) return trim(value / 1e6) + ' M';
  if (value >= 1e4) return trim(value / 1e3) + ' k';
  return value >= 100 ? Math.round(value).toLocaleString('en') : trim(value);
}
export const trim = (value) => (value >= 1000 ? Math.round(value).toLocaleString('en') : value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toPrecision(3)).replace(/\.0+$/, '').replace(/(\.\d*?)0+$/, '$1');
export function bytes(value) {
  for (const unit of ['B', 'KB', 'MB', 'GB', 'TB']) {
    if (value < 1000 || unit === 'TB') return (unit === 'B' ? Math.round(value) : trim(value)) + ' ' + unit;
    value /= 1000;
  }
}
export const percent = (share) => (share > 0 && share < 0.01 ? '< 1 %' : Math.round(100 * share) + ' %');
export const watts = (value) => (value >= 1e6 ? trim(value / 1e6) + ' MW' : value >= 1e3 ? trim(value / 1e3) + ' kW' : Math.round(value).toLocaleString('en') + ' W');
export function seconds(value) {
  if (value >= 1) return trim(value) + ' s';
  return value >= 1e-3 ? trim(value * 1e3) + ' ms' : trim(value * 1e6) + ' µs';
}

export async function ask(path, body, signal) {
  const answer = await fetch(path, body === undefined ? {} : {
    method: 'POST', body: JSON.stringify(body), signal, headers: { 'Content-Type': 'application/json', 'X-Rowstead': '1' },
  });
  if (!answer.ok) throw new Error((await answer.json()).error ?? answer.statusText);
  return answer;
}

export function trouble(text) {
  by('trouble').hidden = !text;
  by('trouble').textContent = text ?? '';
}

export function figure(what, value, more, kind = '') {
  return make('div', { class: 'figure' }, make('div', { class: 'what' }, what), make('div', { class: 'value ' + kind }, value), more ? make('div', { class: 'more' }, more) : null);
}

/** A change in percent with its sign. */
export function change_text(value, before) {
  const percents = 100 * (value / before - 1), shown = Math.abs(percents) < 10 ? Math.abs(percents).toFixed(2) : Math.abs(percents).toFixed(0);
  return (+shown === 0 ? '±' : percents > 0 ? '+' : '−') + (+shown === 0 ? '0' : shown) + ' %';
}
