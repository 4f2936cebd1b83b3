// The what-if page. All numbers come from the server; text is only ever set as text, never as markup.

const by = (id) => document.getElementById(id);

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === 'class') node.className = value;
    else if (value !== undefined && value !== null) node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== undefined && child !== null));
  return node;
}

function drawn(tag, attributes = {}, ...children) {
  const node = document.createElementNS('http://www.w3.org/2000/svg', tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

// numbers as people read them

function count(value) {
  if (value >= 1e12) return trim(value / 1e12) + ' T';
  if (value >= 1e9) return trim(value / 1e9) + ' G';
  if (value >= 1e6) return trim(value / 1e6) + ' M';
  if (value >= 1e4) return trim(value / 1e3) + ' k';
  return value >= 100 ? Math.round(value).toLocaleString('en') : trim(value);
}
const trim = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toPrecision(3)).replace(/\.0+$/, '').replace(/(\.\d*?)0+$/, '$1');
function bytes(value) {
  for (const unit of ['B', 'KB', 'MB', 'GB', 'TB']) {
    if (value < 1000 || unit === 'TB') return (unit === 'B' ? Math.round(value) : trim(value)) + ' ' + unit;
    value /= 1000;
  }
}
const percent = (share) => (share > 0 && share < 0.01 ? '< 1 %' : Math.round(100 * share) + ' %');
const watts = (value) => (value >= 1e6 ? trim(value / 1e6) + ' MW' : value >= 1e4 ? trim(value / 1e3) + ' kW' : Math.round(value).toLocaleString('en') + ' W');
function seconds(value) {
  if (value >= 1) return trim(value) + ' s';
  return value >= 1e-3 ? trim(value * 1e3) + ' ms' : trim(value * 1e6) + ' µs';
}

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

async function ask(path, body, signal) {
  const answer = await fetch(path, body === undefined ? {} : {
    method: 'POST', body: JSON.stringify(body), signal, headers: { 'Content-Type': 'application/json', 'X-Rowstead': '1' },
  });
  if (!answer.ok) throw new Error((await answer.json()).error ?? answer.statusText);
  return answer;
}

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

function trouble(text) {
  by('trouble').hidden = !text;
  by('trouble').textContent = text ?? '';
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

async function load(body, source) {
  try {
    const found = await (await ask('/api/recipe', body)).json();
    const { machine, placement, num_trainers, num_servers } = now().scenario;
    Object.assign(now(), { base: found.base, name: found.name, source, scenario: { ...found.scenario, machine, placement, num_trainers, num_servers } });
    refresh_controls();
    moved();
  } catch (error) {
    trouble(error.message);
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

function figure(what, value, more, kind = '') {
  return make('div', { class: 'figure' }, make('div', { class: 'what' }, what), make('div', { class: 'value ' + kind }, value), more ? make('div', { class: 'more' }, more) : null);
}

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
    const change = (key) => { // of B against A
      const percents = Math.round(100 * (fleet[key] / other[key] - 1));
      return other[key] ? `, ${percents > 0 ? '+' : percents < 0 ? '−' : '±'}${Math.abs(percents)} % against A` : '';
    };
    const full = fleet.memories.map((one) => one.needed_bytes / one.usable_bytes);
    const held = fleet.bottlenecks[0];
    box.append(...[
      figure('throughput', count(fleet.samples_per_s), 'samples/s' + change('samples_per_s')),
      fleet.watts === undefined ? null : figure('power', watts(fleet.watts), `${trim(fleet.samples_per_j)} samples/J${change('samples_per_j')}`),
      figure('one step', seconds(fleet.step_s), fleet.servers + (fleet.num_readers === undefined ? '' : `, ${fleet.num_readers} reader${fleet.num_readers > 1 ? 's' : ''}`)),
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
      return make('div', { class: 'bar of-' + which.toLowerCase() }, track, make('b', { class: one && !one.fits ? 'bad' : '' }, text));
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
    return [make('div', { class: 'quietly' }, title(which)), timeline(which, slots, longest), phase_legend(slots)];
  }));
}

const phase_color = (phase) => `var(--p${state.start.phases.indexOf(phase)})`;

function phase_legend(slots) {
  const phases = state.start.phases.filter((phase) => slots.some((slot) => slot.phase === phase));
  return make('ul', { class: 'legend' }, ...phases.map((phase) => {
    const mark = make('i');
    mark.style.background = phase_color(phase);
    return make('li', {}, mark, phase);
  }));
}

function timeline(which, slots, longest) {
  const lanes = [...new Set(slots.map((slot) => slot.resource))].sort((x, y) => LANES.indexOf(x) - LANES.indexOf(y));
  const width = Math.max(320, by('timelines').clientWidth || 900), left = 104, height = 26, drawn_width = width - left - 8;
  const at = (time) => left + (time / longest) * drawn_width;
  const end = Math.max(...slots.filter((slot) => !slot.is_overlapped).map((slot) => slot.end_s));
  const svg = drawn('svg', { class: 'timeline', viewBox: `0 0 ${width} ${lanes.length * height + 22}`, role: 'img', 'aria-label': `Timeline of one step of ${seconds(end)}: ` + lanes.map((lane) => `${lane} busy ${seconds(slots.filter((s) => s.resource === lane).reduce((sum, s) => sum + s.end_s - s.start_s, 0))}`).join(', ') });
  lanes.forEach((lane, row) => {
    const label = drawn('text', { x: 0, y: row * height + 17, class: 'quiet-text' });
    label.textContent = lane;
    svg.append(label, drawn('rect', { x: left, y: row * height + 3, width: drawn_width, height: height - 6, rx: 4, class: 'lane' }));
    for (const slot of slots.filter((one) => one.resource === lane)) {
      const wide = Math.max(1.2, at(slot.end_s) - at(slot.start_s));
      const box = drawn('rect', { x: at(slot.start_s), y: row * height + 4.5, width: wide, height: height - 9, rx: Math.min(3, wide / 2), fill: phase_color(slot.phase), 'fill-opacity': slot.is_overlapped ? 0.4 : 1, 'data-task': slot.task, 'data-phase': slot.phase });
      const hint = drawn('title');
      hint.textContent = `${slot.phase}: ${slot.task}${slot.is_overlapped ? ' (overlapped)' : ''}, ${seconds(slot.end_s - slot.start_s)}`;
      box.append(hint);
      svg.append(box);
      if (wide > 7 * slot.task.length + 8 && !slot.is_overlapped) {
        const name = drawn('text', { x: at(slot.start_s) + 5, y: row * height + 17, class: 'on-block' });
        name.textContent = slot.task;
        svg.append(name);
      }
    }
  });
  for (const share of [0, 0.5, 1]) {
    const tick = drawn('text', { x: left + share * drawn_width, y: lanes.length * height + 16, 'text-anchor': share === 0 ? 'start' : share === 1 ? 'end' : 'middle', class: 'quiet-text' });
    tick.textContent = share ? seconds(longest * share) : '0';
    svg.append(tick);
  }
  return svg;
}

function draw_memories() {
  by('memories').replaceChildren(...shown().flatMap((which) => (state[which].answer?.fleet.memories ?? []).map((one) => {
    const share = one.needed_bytes / one.usable_bytes;
    const fill = make('i');
    fill.style.width = Math.min(100, 100 * share) + '%';
    return make('div', { class: `memory of-${which.toLowerCase()}` + (share > 1 ? ' over' : '') },
      make('div', { class: 'what' }, make('span', {}, `${which}: ${one.what}`), make('b', {}, percent(share))),
      make('div', { class: 'track', 'aria-hidden': 'true' }, fill),
      make('div', { class: 'quietly' }, `${bytes(one.needed_bytes)} of ${bytes(one.usable_bytes)} usable`));
  })));
}

function draw() {
  draw_cards();
  draw_platforms();
  draw_timelines();
  draw_memories();
}

// runs

async function show_runs() {
  const found = await (await ask('/api/runs')).json();
  const some = found.num_runs > found.runs.length ? ` ${found.runs.length} of them are listed.` : '';
  by('runs-note').textContent = found.num_runs ? `${found.num_runs.toLocaleString('en')} under ${found.root}, the newest first.${some}` : `No runs under ${found.root} yet. Run rowstead train to create one.`;
  by('all-runs').hidden = !found.num_runs && !found.studies.length;
  by('studies').hidden = !found.studies.length;
  const heads = ['Study', 'Kind', 'measured', 'predicted', 'failed'].map((text, i) => make('th', { scope: 'col', class: i > 1 ? 'number' : '' }, text));
  const rows = found.studies.map((one) => make('tr', {}, make('th', { scope: 'row' }, one.name), make('td', {}, one.kind), ...[one.num_measured, one.num_predicted, one.num_failed].map((n) => make('td', { class: 'number' }, n.toLocaleString('en')))));
  by('study-list').replaceChildren(make('thead', {}, make('tr', {}, ...heads)), make('tbody', {}, ...rows));
  by('run-list').hidden = !found.num_runs;
  const columns = [['samples_per_s', 'samples/s', count], ['ne', 'NE', (x) => x.toFixed(4)], ['auc', 'AUC', (x) => x.toFixed(4)], ['num_samples', 'samples', count], ['train_s', 'time', seconds]];
  const head = make('thead', {}, make('tr', {}, ...['Run', 'Date', 'Status', ...columns.map(([, text]) => text), ''].map((text, i) => make('th', { scope: 'col', class: i > 2 && i < 8 ? 'number' : '' }, text))));
  const body = make('tbody', {}, ...found.runs.map((run) => {
    const plan_it = make('button', { type: 'button', class: 'quiet' }, 'Plan with it');
    plan_it.setAttribute('aria-label', `Plan with the recipe of ${run.name}`);
    plan_it.addEventListener('click', async () => {
      await load({ run: run.name }, 'run:' + run.name);
      view('plan');
    });
    return make('tr', {},
      make('th', { scope: 'row' }, make('a', { href: '/report/' + encodeURIComponent(run.name), target: '_blank', rel: 'noopener' }, run.name)),
      make('td', {}, run.date?.slice(0, 16).replace('T', ' ') ?? ''),
      make('td', { class: 'status ' + run.status, title: run.why }, run.error ?? (run.why ? `failed: ${run.why}` : run.status)),
      ...columns.map(([key, , format]) => make('td', { class: 'number' }, run.figures?.[key] === undefined ? '' : format(run.figures[key]))),
      make('td', {}, plan_it));
  }));
  by('run-list').replaceChildren(make('caption', { class: 'spoken' }, 'Runs'), head, body);
}

// runs that are training

let following;
async function follow() {
  clearTimeout(following);
  if (by('runs').hidden) return;
  try {
    const found = await (await ask('/api/live')).json();
    const before = by('live-list').dataset.names ?? '', names = found.map((one) => one.name).join('\n');
    by('live').hidden = !found.length;
    by('live-list').dataset.names = names;
    by('live-list').replaceChildren(...found.map(live_run));
    if (before && before !== names) show_runs(); // one has ended or begun
  } catch (error) {
    trouble(error.message);
  }
  following = setTimeout(follow, 1500);
}

function live_run(run) {
  const last = run.points.at(-1), whole = last === undefined;
  const box = make('div', { class: 'live-run', 'data-run': run.name }, make('div', { class: 'name' }, run.name));
  if (whole) {
    box.append(make('p', { class: 'note' }, 'starting: no steps were logged yet'));
    return box;
  }
  const evaluated = run.evaluation ? `last evaluation ${run.evaluation.ne.toFixed(4)} at step ${run.evaluation.step.toLocaleString('en')}` : '';
  box.append(figure('step', last.step.toLocaleString('en'), `${count(last.num_samples ?? 0)} samples`));
  box.append(figure('waiting for data', percent(last.waiting_share ?? 0), 'of the time'));
  for (const [key, what, show, more] of [['ne', 'NE', (x) => x.toFixed(4), evaluated], ['loss', 'loss', (x) => x.toFixed(4), ''], ['samples_per_s', 'samples/s', count, '']]) {
    const points = run.points.filter((point) => point[key] !== undefined);
    if (!points.length) continue;
    const part = figure(what, show(points.at(-1)[key]), more);
    part.append(sparkline(what, points.map((point) => [point.step, point[key]]), show));
    box.append(part);
  }
  return box;
}

function sparkline(what, points, show) {
  const values = points.map(([, y]) => y), low = Math.min(...values), high = Math.max(...values), width = 150, height = 36;
  const from = points[0][0], to = Math.max(points.at(-1)[0], from + 1);
  const x = (step) => 2 + ((width - 4) * (step - from)) / (to - from), y = (value) => height - 3 - ((height - 6) * (value - low)) / (high - low || 1);
  const svg = drawn('svg', { class: 'sparkline', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${what} from step ${from} to ${to}: between ${show(low)} and ${show(high)}` });
  svg.append(drawn('polyline', { points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(' ') }));
  svg.append(drawn('circle', { cx: x(points.at(-1)[0]), cy: y(values.at(-1)), r: 2.5 }));
  return svg;
}

function view(name) {
  for (const one of ['plan', 'runs']) {
    by(one).hidden = one !== name;
    by('view-' + one).setAttribute('aria-pressed', String(one === name));
  }
  by('short').hidden = name !== 'plan';
  if (name === 'runs') {
    show_runs().catch((error) => trouble(error.message));
    follow();
  }
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
  plan('A');
}

begin().catch((error) => trouble(error.message));
