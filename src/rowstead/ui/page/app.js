// The what-if page. All numbers come from the server; text is only ever set as text, never as markup.

import { ask, by, bytes, change_text, count, drawn, figure, make, percent, seconds, trim, trouble, watts } from './common.js';
import { follow, show_runs } from './runs.js';

// what the sliders can be set to

function steps(least, most, mantissas) {
  const found = new Set();
  for (let power = 0; power <= 12; power++) for (const m of mantissas) {
    const value = Math.round(m * 10 ** power);
    if (value >= least && value <= most) found.add(value);
  }
  return [...found].sort((x, y) => x - y);
}
function doubled(least, most) {
  const found = [];
  for (let value = least; value <= most; value *= 2) {
    found.push(value);
    if (value >= 8 && value * 1.5 < most) found.push(value * 1.5);
  }
  return found;
}
const range = (least, most) => Array.from({ length: most - least + 1 }, (_, i) => least + i);
const fine = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8];

const SLIDERS = {
  Features: [
    { key: 'num_dense', label: 'Dense features', values: [0, ...steps(1, 8192, fine)], show: count },
    { key: 'num_sparse', label: 'Sparse features', values: steps(1, 500, fine), show: count },
    { key: 'ids', label: 'Ids per feature', values: steps(1, 500, fine), show: count },
    { key: 'num_rows', label: 'Hash size (rows per table)', values: steps(10, 1e9, fine), show: count },
    { key: 'width', label: 'Row width', values: doubled(2, 512), show: count },
  ],
  Layers: [
    { key: 'bottom', part: 'width', label: 'Bottom MLP width', values: doubled(8, 8192), show: count },
    { key: 'bottom', part: 'layers', label: 'Bottom MLP layers', values: range(0, 10), show: String },
    { key: 'top', part: 'width', label: 'Top MLP width', values: doubled(8, 8192), show: count },
    { key: 'top', part: 'layers', label: 'Top MLP layers', values: range(0, 10), show: String },
  ],
  Training: [{ key: 'batch_size', label: 'Batch (each GPU or CPU trainer)', values: doubled(8, 131072), show: count }],
  Fleet: [
    { key: 'num_trainers', label: 'Servers that train', values: [...range(1, 16), 20, 24, 32, 48, 64, 96, 128, 256], show: count },
    { key: 'num_servers', label: 'Parameter servers', values: [0, ...range(1, 16), 20, 24, 32, 48, 64, 96, 128, 256], show: (n) => (n ? count(n) : 'as many as pay off') },
  ],
};
const CHOICES = {
  Training: [
    { key: 'optimizer', label: 'Row optimizer', options: [] },
    { key: 'row_format', label: 'Row format', options: [['fp32', 'FP32'], ['bf16', 'BF16'], ['fp16', 'FP16']] },
    { key: 'precision', label: 'Dense arithmetic', options: [['fp32', 'FP32'], ['tf32', 'TF32'], ['bf16', 'BF16']] },
    { key: 'interaction', label: 'Interaction', options: [] },
  ],
  Fleet: [
    { key: 'machine', label: 'Machine', options: [] },
    { key: 'placement', label: 'Tables in', options: [] },
  ],
};

const state = {
  which: 'A', measure: 'samples_per_s', start: null,
  A: { scenario: null, base: null, name: 'from scratch', answer: null, platforms: new Map() },
  B: { scenario: null, base: null, name: 'from scratch', answer: null, platforms: new Map() },
  has_b: false,
};
const now = () => state[state.which];
const shown = () => (state.has_b ? ['A', 'B'] : ['A']);

// requests

const asking = { A: null, B: null };

async function plan(which) {
  // The newest request wins: one that has shown its first figures is aborted for a newer one; before that, the newer one waits.
  const open = asking[which];
  if (open) {
    open.again = true;
    if (open.began) open.stop.abort();
    return;
  }
  const mine = { stop: new AbortController(), began: false, again: false };
  asking[which] = mine;
  const one = state[which];
  try {
    const answer = await ask('/api/plan', { scenario: one.scenario, base: one.base }, mine.stop.signal);
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = '';
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const lines = (rest + value).split('\n');
      rest = lines.pop();
      for (const line of lines) take(which, JSON.parse(line), mine);
      draw_platforms();
    }
    trouble(null);
    speak(which);
  } catch (error) {
    if (error.name !== 'AbortError') trouble(error.message);
  } finally {
    asking[which] = null;
    if (mine.again) plan(which);
  }
}

function take(which, line, mine) {
  const one = state[which];
  if (line.error) throw new Error(line.error);
  if (line.fleet) {
    one.answer = line;
    mine.began = true;
    draw_cards();
    draw_timelines();
    draw_memories();
  }
  if (line.platform) one.platforms.set(line.platform.machine, line.platform);
}

let speaking;
function speak(which) {
  clearTimeout(speaking);
  speaking = setTimeout(() => {
    const fleet = state[which].answer?.fleet;
    if (!fleet) return;
    by('spoken').textContent = fleet.fits
      ? `Scenario ${which} on ${fleet.machine}: ${count(fleet.samples_per_s)} samples per second, tables in ${fleet.placement}, bottleneck ${fleet.bottlenecks[0]?.resource ?? 'none'}.`
      : `Scenario ${which} does not fit ${fleet.machine}.`;
  }, 600);
}

// controls

function read_part(scenario, { key, part }) {
  if (!part) return scenario[key];
  return part === 'layers' ? scenario[key].length : Math.max(8, ...scenario[key]);
}
function write_part(scenario, { key, part }, value) {
  if (!part) scenario[key] = value;
  else if (part === 'layers') scenario[key] = Array(value).fill(read_part(scenario, { key, part: 'width' }));
  else scenario[key] = scenario[key].length ? scenario[key].map(() => value) : [value];
}

const controls = [];

function build_controls() {
  const form = by('sliders');
  for (const group of Object.keys(SLIDERS)) {
    const set = make('fieldset', {}, make('legend', {}, group));
    for (const one of CHOICES[group] ?? []) if (group === 'Fleet') set.append(choice(one));
    for (const one of SLIDERS[group]) set.append(slider(one));
    for (const one of CHOICES[group] ?? []) if (group !== 'Fleet') set.append(choice(one));
    form.append(set);
  }
}

function slider(one) {
  const id = 'slider-' + one.key + (one.part ? '-' + one.part : '');
  const input = make('input', { type: 'range', id, min: 0, step: 1 });
  const output = make('output', { for: id });
  let values = one.values;
  const refresh = () => {
    const value = read_part(now().scenario, one);
    values = one.values.includes(value) ? one.values : [...one.values, value].sort((x, y) => x - y);
    input.max = values.length - 1;
    input.value = values.indexOf(value);
    mark();
  };
  const mark = () => {
    const value = values[+input.value];
    const layers = now().scenario[one.key];
    const uneven = one.part === 'width' && new Set(layers).size > 1;
    output.textContent = uneven ? layers.join('-') : one.show(value);
    input.setAttribute('aria-valuetext', output.textContent);
    input.style.setProperty('--done', (100 * input.value) / Math.max(1, input.max) + '%');
  };
  input.addEventListener('input', () => {
    write_part(now().scenario, one, values[+input.value]);
    for (const control of controls) if (control.key === one.key && control.input !== input) control.refresh();
    mark();
    moved();
  });
  controls.push({ key: one.key, input, refresh });
  return make('div', { class: 'slider' }, make('label', { for: id }, one.label), output, input);
}

function choice(one) {
  const id = 'choice-' + one.key;
  const select = make('select', { id });
  for (const [value, title] of one.options) select.append(make('option', { value }, title));
  select.addEventListener('change', () => {
    now().scenario[one.key] = select.value;
    moved();
  });
  controls.push({ key: one.key, input: select, refresh: () => { select.value = now().scenario[one.key]; } });
  return make('div', { class: 'choice' }, make('label', { for: id }, one.label), select);
}

function moved() {
  plan(state.which);
}

function refresh_controls() {
  by('sliders').parentElement.style.setProperty('--now', state.which === 'A' ? 'var(--a)' : 'var(--b)');
  for (const control of controls) control.refresh();
  by('recipe').value = [...by('recipe').options].some((option) => option.value === now().source) ? now().source : '';
  by('recipe-note').textContent = now().base ? `Scenario ${state.which} is based on ${now().name}; settings that you do not change stay as they are there.` : `Scenario ${state.which}: all features are alike.`;
}

function switch_to(which) {
  if (which === 'B' && !state.has_b) copy_to_b();
  state.which = which;
  document.querySelector(`input[name="which"][value="${which}"]`).checked = true;
  refresh_controls();
  draw_platforms();
}

function copy_to_b() {
  const { scenario, base, name, source } = state.A;
  Object.assign(state.B, { scenario: structuredClone(scenario), base, name, source, answer: state.A.answer, platforms: new Map(state.A.platforms) });
  state.has_b = true;
  draw();
  plan('B');
}

async function load(body, source, { is_quiet = false } = {}) {
  try {
    const found = await (await ask('/api/recipe', body)).json();
    const { machine, placement, num_trainers, num_servers } = now().scenario;
    Object.assign(now(), { base: found.base, name: found.name, source, scenario: { ...found.scenario, machine, placement, num_trainers, num_servers } });
    refresh_controls();
    moved();
  } catch (error) {
    if (!is_quiet) trouble(error.message);
  }
}

async function save() {
  try {
    const { text } = await (await ask('/api/save', { scenario: now().scenario, base: now().base })).json();
    const link = make('a', { href: 'data:text/yaml;charset=utf-8,' + encodeURIComponent(text), download: (now().name.replace(/[^\w.-]+/g, '-') || 'what-if') + '-what-if.yaml' });
    link.click();
  } catch (error) {
    trouble(error.message);
  }
}

// drawing

function title(which) {
  const { name, scenario } = state[which];
  return `${which}: ${name} on ${scenario.num_trainers > 1 ? scenario.num_trainers + ' × ' : ''}${scenario.machine}`;
}

function draw_cards() {
  const rows = shown().map((which) => {
    const { answer } = state[which];
    const box = make('div', { class: 'scenario of-' + which.toLowerCase(), id: 'card-' + which }, make('div', { class: 'name' }, title(which)));
    if (!answer) return box;
    const { fleet, model, notes } = answer;
    box.append(...notes.map((text) => make('p', { class: 'note' }, text)));
    if (!fleet.fits) {
      box.append(figure('memory', 'does not fit', fleet.why.join('; '), 'text bad'), figure('tables', bytes(model.table_bytes), count(model.num_parameters) + ' parameters'));
      if (fleet.remedies.length) box.append(make('ol', { class: 'remedies' }, ...fleet.remedies.map((text) => make('li', {}, text))));
      return box;
    }
    const other = which === 'B' && state.A.answer?.fleet.fits ? state.A.answer.fleet : {};
    const against = (node, key, more_is_better) => { // what B changes
      if (!node || !other[key] || fleet[key] === undefined) return node;
      const change = fleet[key] / other[key] - 1;
      const kind = Math.abs(change) < 0.0005 || more_is_better === null ? '' : (change > 0) === more_is_better ? ' good' : ' bad';
      node.querySelector('.value').after(make('div', { class: 'change' + kind }, change_text(fleet[key], other[key]) + ' against A'));
      return node;
    };
    const full = fleet.memories.map((one) => one.needed_bytes / one.usable_bytes);
    const held = fleet.bottlenecks[0];
    box.append(...[
      against(figure('throughput', count(fleet.samples_per_s), 'samples/s'), 'samples_per_s', true),
      fleet.watts === undefined ? null : against(figure('efficiency', trim(fleet.samples_per_j), `samples/J at ${watts(fleet.watts)}`), 'samples_per_j', true),
      against(figure('one step', seconds(fleet.step_s), fleet.servers + (fleet.num_readers === undefined ? '' : `, ${fleet.num_readers} reader${fleet.num_readers > 1 ? 's' : ''}`)), 'step_s', false),
      figure('memory', percent(Math.max(...full)) + ' full', `tables ${bytes(model.table_bytes)}, in ${fleet.placement}`),
      figure('bottleneck', held?.resource ?? '', held ? `if twice as fast: ${Math.round(100 * held.saved_share)} % shorter steps` : '', 'text'),
      figure('per example', count(model.ids_per_sample) + ' ids', `${count(model.flops_per_sample)} operations`, 'text'),
    ].filter(Boolean));
    return box;
  });
  by('cards').replaceChildren(...rows);
  by('short').replaceChildren(...shown().map((which) => {
    const fleet = state[which].answer?.fleet;
    const text = !fleet ? '…' : !fleet.fits ? 'does not fit' : `${count(fleet.samples_per_s)} samples/s` + (fleet.watts === undefined ? '' : ` · ${watts(fleet.watts)}`) + ` · ${fleet.bottlenecks[0]?.resource ?? ''}`;
    return make('div', { class: 'of-' + which.toLowerCase() }, make('b', {}, which), ' ' + text);
  }));
}

const MEASURES = { samples_per_s: 'samples/s', samples_per_j: 'samples/J', watts: 'watts' };

function draw_platforms() {
  const table = by('platforms');
  const names = [...state.A.platforms.keys()];
  if (!names.length) return;
  const value = (which, name) => state[which].platforms.get(name)?.[state.measure];
  const most = Math.max(...shown().flatMap((which) => names.map((name) => value(which, name) ?? 0)), 1e-9);
  names.sort((x, y) => (value('A', y) ?? -1) - (value('A', x) ?? -1) || x.localeCompare(y));
  const head = make('thead', {}, make('tr', {}, ...[['Machine', ''], [MEASURES[state.measure], ''], ['Tables in', ''], ['Servers', ''], ['Bottleneck', ''], ['Memory', 'number']].map(([text, kind]) => make('th', { scope: 'col', class: kind }, text))));
  const body = make('tbody', {}, ...names.map((name) => {
    const of = (which) => state[which].platforms.get(name);
    const bars = shown().map((which) => {
      const one = of(which), figure_ = value(which, name);
      const track = make('span', { class: 'track', 'aria-hidden': 'true' }, make('i'));
      track.firstChild.style.width = (100 * (figure_ ?? 0)) / most + '%';
      const text = one === undefined ? '…' : !one.fits ? 'does not fit' : figure_ === undefined ? 'unknown' : count(figure_);
      const before = which === 'B' ? value('A', name) : undefined;
      const change = before && figure_ !== undefined && figure_ !== before ? make('span', { class: 'quietly' }, change_text(figure_, before)) : null;
      return make('div', { class: 'bar of-' + which.toLowerCase() }, track, make('b', { class: one && !one.fits ? 'bad' : '' }, text), change);
    });
    const both = (pick) => {
      const texts = shown().map((which) => (of(which)?.fits ? pick(of(which)) : ''));
      return new Set(texts).size === 1 ? [texts[0]] : texts.map((text, i) => make('div', {}, make('span', { class: 'quietly' }, shown()[i] + ' '), text));
    };
    const full = (one) => percent(Math.max(...one.memories.map((m) => m.needed_bytes / m.usable_bytes)));
    return make('tr', { class: state[state.which].scenario.machine === name ? 'chosen' : '', 'data-machine': name },
      make('th', { scope: 'row', title: of('A')?.title }, name),
      make('td', { class: 'bars' }, ...bars),
      make('td', { 'data-what': 'tables in' }, ...both((one) => one.placement)),
      make('td', { 'data-what': 'servers' }, ...both((one) => one.servers)),
      make('td', { 'data-what': 'bottleneck' }, ...both((one) => one.bottlenecks[0]?.resource ?? '')),
      make('td', { class: 'number', 'data-what': 'memory' }, ...both(full)));
  }));
  table.replaceChildren(make('caption', { class: 'spoken' }, 'Best set-up on every platform, by ' + MEASURES[state.measure]), head, body);
}

const LANES = ['dispatch', 'device', 'device links', 'host link', 'host cores', 'host memory', 'network out', 'network in', 'sparse servers', 'dense servers'];

function draw_timelines() {
  const longest = Math.max(...shown().map((which) => Math.max(0, ...(state[which].answer?.fleet.timeline ?? []).map((slot) => slot.end_s))));
  by('timelines').replaceChildren(...shown().flatMap((which) => {
    const slots = state[which].answer?.fleet.timeline;
    if (!slots?.length) return [];
    return [make('div', { class: 'timeline-of' }, make('div', { class: 'quietly' }, title(which)), timeline(which, slots, longest)), tasks_table(which, slots)];
  }));
}

const lane_color = (lane) => `var(--p${Math.max(0, LANES.indexOf(lane))})`;
const LABEL_PX = 6.6; // of a letter
/** Labels that fit beside each other, each below its block: those of the longest blocks first. */
function labels_below(slots, at, right) {
  const taken = [];
  return [...slots].sort((one, other) => other.end_s - other.start_s - (one.end_s - one.start_s)).flatMap((slot) => {
    const wide = LABEL_PX * slot.task.length, from = Math.min(at(slot.start_s), right - wide), to = from + wide;
    if (taken.some(([a, b]) => from < b + 8 && to > a - 8)) return [];
    taken.push([from, to]);
    return [{ slot, from }];
  });
}

function timeline(which, slots, longest) {
  const lanes = [...new Set(slots.map((slot) => slot.resource))].sort((x, y) => LANES.indexOf(x) - LANES.indexOf(y));
  const width = Math.max(320, by('timelines').clientWidth || 900), left = 104, right = width - 8, height = 42, block = 20;
  const at = (time) => left + (time / longest) * (right - left);
  const end = Math.max(...slots.filter((slot) => !slot.is_overlapped).map((slot) => slot.end_s));
  const svg = drawn('svg', { class: 'timeline', viewBox: `0 0 ${width} ${lanes.length * height + 22}`, role: 'img', 'aria-label': `Timeline of one step of ${seconds(end)}: ` + lanes.map((lane) => `${lane} busy ${seconds(slots.filter((s) => s.resource === lane).reduce((sum, s) => sum + s.end_s - s.start_s, 0))}`).join(', ') });
  const text = (where, content) => {
    const node = drawn('text', where);
    node.textContent = content;
    svg.append(node);
  };
  lanes.forEach((lane, row) => {
    const top = row * height + 2, of_lane = slots.filter((one) => one.resource === lane);
    text({ x: 0, y: top + 14, class: 'quiet-text lane-name' }, lane);
    svg.append(drawn('rect', { x: left, y: top, width: right - left, height: block, rx: 4, class: 'lane' }));
    const is_wide = (slot) => at(slot.end_s) - at(slot.start_s) > LABEL_PX * slot.task.length + 10 && !slot.is_overlapped;
    for (const slot of of_lane) {
      const wide = Math.max(1.2, at(slot.end_s) - at(slot.start_s));
      const box = drawn('rect', { x: at(slot.start_s), y: top + 1.5, width: Math.max(1.2, wide - 1), height: block - 3, rx: Math.min(3, wide / 2), fill: lane_color(lane), 'fill-opacity': slot.is_overlapped ? 0.4 : 1, 'data-task': slot.task, 'data-resource': lane });
      const hint = drawn('title');
      hint.textContent = `${slot.phase}: ${slot.task}${slot.is_overlapped ? ' (overlapped)' : ''}, ${seconds(slot.end_s - slot.start_s)}`;
      box.append(hint);
      svg.append(box);
      if (is_wide(slot)) text({ x: at(slot.start_s) + 5, y: top + 14.5, class: 'on-block' }, slot.task);
    }
    for (const { slot, from } of labels_below(of_lane.filter((slot) => !is_wide(slot)), at, right)) text({ x: from, y: top + block + 13, class: 'quiet-text below' }, slot.task);
  });
  for (const share of [0, 0.5, 1]) text({ x: left + share * (right - left), y: lanes.length * height + 16, 'text-anchor': share === 0 ? 'start' : share === 1 ? 'end' : 'middle', class: 'quiet-text' }, share ? seconds(longest * share) : '0');
  return svg;
}

function tasks_table(which, slots) {
  const heads = ['Task', 'Phase', 'Resource', 'starts', 'takes'].map((text, i) => make('th', { scope: 'col', class: i > 2 ? 'number' : '' }, text));
  const rows = [...slots].sort((x, y) => x.start_s - y.start_s).map((slot) => make('tr', {}, make('th', { scope: 'row' }, slot.task), make('td', {}, slot.phase + (slot.is_overlapped ? ' (overlapped)' : '')), make('td', {}, slot.resource), make('td', { class: 'number' }, seconds(slot.start_s)), make('td', { class: 'number' }, seconds(slot.end_s - slot.start_s))));
  const table = make('table', { 'aria-label': `Tasks of a step of ${which}` }, make('thead', {}, make('tr', {}, ...heads)), make('tbody', {}, ...rows));
  const details = make('details', { class: 'tasks' }, make('summary', {}, `${slots.length} tasks`), make('div', { class: 'wide', tabindex: 0, role: 'region', 'aria-label': `Tasks of a step of ${which}` }, table));
  details.open = open_tasks.has(which);
  details.addEventListener('toggle', () => (details.open ? open_tasks.add(which) : open_tasks.delete(which)));
  return details;
}
const open_tasks = new Set();

function draw_memories() {
  by('memories').replaceChildren(...shown().map((which) => make('div', { class: 'memories' }, ...(state[which].answer?.fleet.memories ?? []).map((one) => {
    const share = one.needed_bytes / one.usable_bytes;
    const fill = make('i');
    fill.style.width = Math.min(100, 100 * share) + '%';
    return make('div', { class: `memory of-${which.toLowerCase()}` + (share > 1 ? ' over' : '') },
      make('div', { class: 'what' }, make('span', {}, `${which}: ${one.what}`), make('b', {}, percent(share))),
      make('div', { class: 'track', 'aria-hidden': 'true' }, fill),
      make('div', { class: 'quietly' }, `${bytes(one.needed_bytes)} of ${bytes(one.usable_bytes)} usable`));
  }))));
}

function draw() {
  draw_cards();
  draw_platforms();
  draw_timelines();
  draw_memories();
}

function view(name) {
  for (const one of ['plan', 'runs']) {
    by(one).hidden = one !== name;
    by('view-' + one).setAttribute('aria-pressed', String(one === name));
  }
  by('short').hidden = name !== 'plan';
  if (location.hash !== '#' + name) history.replaceState(null, '', '#' + name);
  if (name === 'runs') {
    show_runs(plan_with).catch((error) => trouble(error.message));
    follow(plan_with);
  }
}

async function plan_with(name) {
  await load({ run: name }, 'run:' + name);
  view('plan');
}

async function begin() {
  state.start = await (await ask('/api/start')).json();
  CHOICES.Training.find((one) => one.key === 'optimizer').options = state.start.row_optimizers.map((one) => [one.name, one.title]);
  CHOICES.Fleet[0].options = state.start.machines.map((one) => [one.name, `${one.name}: ${one.title}`]);
  CHOICES.Training.find((one) => one.key === 'interaction').options = state.start.interactions.map((one) => [one.name, one.title]);
  CHOICES.Fleet[1].options = [['auto', 'best placement'], ...state.start.placements.map((one) => [one.name, one.title])];
  by('recipe').append(make('option', { value: '' }, 'from scratch, or a file'), ...state.start.recipes.map((one) => make('option', { value: one.name }, `${one.name}: ${one.about}`)));
  if (state.start.runs.length) by('recipe').append(make('optgroup', { label: 'Recipes of runs' }, ...state.start.runs.slice(0, 50).map((name) => make('option', { value: 'run:' + name }, name))));
  if (state.start.left_out) by('left-out').textContent = ` This machine was calibrated but is left out: ${state.start.left_out}`;
  state.A.scenario = { ...state.start.scenario };
  build_controls();
  refresh_controls();
  for (const radio of document.querySelectorAll('input[name="which"]')) radio.addEventListener('change', () => switch_to(radio.value));
  for (const radio of document.querySelectorAll('input[name="measure"]')) radio.addEventListener('change', () => { state.measure = radio.value; draw_platforms(); });
  by('copy').addEventListener('click', () => { copy_to_b(); switch_to('B'); });
  by('save').addEventListener('click', save);
  by('file').addEventListener('change', async () => {
    const [file] = by('file').files;
    if (file) await load({ text: await file.text() }, '');
    by('file').value = '';
  });
  by('recipe').addEventListener('change', () => {
    const name = by('recipe').value;
    if (name.startsWith('run:')) load({ run: name.slice(4) }, name);
    else if (name) load({ name }, name);
    else { Object.assign(now(), { base: null, name: 'from scratch', source: '' }); refresh_controls(); moved(); }
  });
  by('view-plan').addEventListener('click', () => view('plan'));
  by('view-runs').addEventListener('click', () => view('runs'));
  addEventListener('resize', draw_timelines);
  if (state.start.runs.length) await load({ run: state.start.runs[0] }, 'run:' + state.start.runs[0], { is_quiet: true });
  if (!state.A.base) plan('A');
  if (location.hash === '#runs' || (state.start.is_training && !location.hash)) view('runs');
}

begin().catch((error) => trouble(error.message));
