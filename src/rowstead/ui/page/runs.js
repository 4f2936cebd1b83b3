// The list of runs, what is training now, and the comparison of runs. Text is only ever set as text, never as markup.

import { ask, by, bytes, change_text, count, drawn, figure, make, percent, seconds, trouble } from './common.js';

const digits = (x) => (Math.abs(x) < 100 ? x.toFixed(4) : count(x));
const COLUMNS = [['ne', 'NE', digits], ['auc', 'AUC', digits], ['samples_per_s', 'samples/s', count], ['num_samples', 'samples', count], ['train_s', 'time', seconds]];
const MOST_COMPARED = 6;
const chosen = new Set();

/** List the runs; `plan_with` makes a run's recipe the scenario. */
export async function show_runs(plan_with) {
  const found = await (await ask('/api/runs')).json();
  const some = found.num_runs > found.runs.length ? ` ${found.runs.length} of them are listed.` : '';
  by('runs-note').textContent = found.num_runs ? `${found.num_runs.toLocaleString('en')} ${found.num_runs === 1 ? 'run' : 'runs'} in the folder ${found.root}, the newest first.${some} Tick two or more to compare them.` : `No runs under ${found.root} yet. Run rowstead train to create one.`;
  by('all-runs').hidden = !found.num_runs && !found.studies.length;
  by('studies').hidden = !found.studies.length;
  const heads = ['Study', 'Kind', 'measured', 'predicted', 'failed'].map((text, i) => make('th', { scope: 'col', class: i > 1 ? 'number' : '' }, text));
  const rows = found.studies.map((one) => make('tr', {}, make('th', { scope: 'row' }, one.name), make('td', {}, one.kind), ...[one.num_measured, one.num_predicted, one.num_failed].map((n) => make('td', { class: 'number' }, n.toLocaleString('en')))));
  by('study-list').replaceChildren(make('thead', {}, make('tr', {}, ...heads)), make('tbody', {}, ...rows));
  by('run-list').hidden = !found.num_runs;
  const names = new Set(found.runs.map((run) => run.name));
  for (const name of chosen) if (!names.has(name)) chosen.delete(name);
  const columns = COLUMNS.filter(([key]) => found.runs.some((run) => run.figures?.[key] !== undefined));
  const titles = ['Run', 'Status', 'NE while training', ...columns.map(([, text]) => text), 'Date', 'Recipe'];
  const head = make('thead', {}, make('tr', {}, ...titles.map((text, i) => make('th', { scope: 'col', class: i > 2 && i < 3 + columns.length ? 'number' : '' }, text))));
  by('run-list').replaceChildren(make('caption', { class: 'spoken' }, 'Runs'), head, make('tbody', {}, ...found.runs.map((run) => row(run, columns, plan_with))));
  compare();
}

function row(run, columns, plan_with) {
  const plan_it = make('button', { type: 'button', class: 'quiet' }, 'Plan with it');
  plan_it.setAttribute('aria-label', `Plan with the recipe of ${run.name}`);
  plan_it.addEventListener('click', () => plan_with(run.name));
  const tick = make('input', { type: 'checkbox', 'aria-label': `Compare ${run.name}`, value: run.name });
  tick.checked = chosen.has(run.name);
  tick.addEventListener('change', () => {
    if (tick.checked) chosen.add(run.name);
    else chosen.delete(run.name);
    compare();
  });
  const link = make('a', { href: '/report/' + encodeURIComponent(run.name), target: '_blank', rel: 'noopener' }, run.name);
  const small = run.curve?.length > 1 ? sparkline('NE', run.curve, digits) : '';
  return make('tr', {},
    make('th', { scope: 'row' }, tick, link),
    make('td', { class: 'status ' + run.status, title: run.why }, run.error ?? (run.why ? `failed: ${run.why}` : run.status)),
    make('td', { class: 'curve' }, small),
    ...columns.map(([key, text, format]) => make('td', { class: 'number', 'data-what': run.figures?.[key] === undefined ? undefined : text }, run.figures?.[key] === undefined ? '' : format(run.figures[key]))),
    make('td', { class: 'date' }, run.date?.slice(0, 16).replace('T', ' ') ?? ''),
    make('td', {}, plan_it));
}

// comparison

let comparing = 0;
async function compare() {
  const mine = ++comparing, names = [...chosen].slice(0, MOST_COMPARED);
  by('comparison').hidden = names.length < 2;
  if (names.length < 2) return;
  try {
    const { runs, settings } = await (await ask('/api/compare', { runs: names })).json();
    if (mine !== comparing) return; // another tick came
    draw_comparison(runs, settings);
  } catch (error) {
    trouble(error.message);
  }
}

function draw_comparison(runs, settings) {
  const ink = (i) => `var(--r${i})`;
  const name = (run, i) => {
    const mark = make('i');
    mark.style.background = ink(i);
    return make('th', { scope: 'col', class: 'number' }, mark, run.name);
  };
  const cell = (run, i, key, format) => {
    const value = run.figures[key], first = runs[0].figures[key];
    const change = i && value !== undefined && first ? make('div', { class: 'quietly' }, change_text(value, first)) : null;
    return make('td', { class: 'number' }, value === undefined ? '' : format(value), change);
  };
  const line = (title, cells) => make('tr', {}, make('th', { scope: 'row' }, title), ...cells);
  const rows = COLUMNS.filter(([key]) => runs.some((run) => run.figures[key] !== undefined)).map(([key, text, format]) => line(text, runs.map((run, i) => cell(run, i, key, format))));
  const differ = settings.map((one) => line(one.name, one.values.map((value) => make('td', { class: 'number' }, value))));
  const of_settings = differ.length ? [] : [line('settings', [make('td', { colspan: runs.length }, 'no setting differs')])];
  const curves = runs.map((run, i) => ({ name: run.name, ink: ink(i), points: run.curve })).filter((one) => one.points.length > 1);
  by('comparison-chart').replaceChildren(...(curves.length ? [chart('NE', curves)] : []));
  by('comparison-table').replaceChildren(make('caption', { class: 'spoken' }, 'Comparison of runs with the first one, and settings that differ'), make('thead', {}, make('tr', {}, make('th', { scope: 'col' }, 'against the first'), ...runs.map(name))), make('tbody', {}, ...rows, ...differ, ...of_settings));
}

/** A few round numbers from `low` to `high`. */
function ticks(low, high) {
  const raw = (high - low) / 5 || 1, power = 10 ** Math.floor(Math.log10(raw)), step = [1, 2, 5, 10].find((one) => one * power >= raw) * power;
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high + step * 1e-9; k++) found.push(+(k * step).toPrecision(12));
  return found;
}

function chart(what, curves) {
  const every = curves.flatMap((one) => one.points), width = Math.max(300, by('comparison').clientWidth - 2), height = 240, left = 52, bottom = 34;
  const [low, high] = [Math.min(...every.map(([, y]) => y)), Math.max(...every.map(([, y]) => y))], to = Math.max(...every.map(([x]) => x));
  const x = (samples) => left + ((width - left - 24) * samples) / to, y = (value) => 10 + ((height - bottom - 14) * (high - value)) / (high - low || 1);
  const svg = drawn('svg', { class: 'timeline', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${what} over samples: ` + curves.map((one) => `${one.name} ends at ${digits(one.points.at(-1)[1])}`).join(', ') });
  const text = (where, content) => {
    const node = drawn('text', { class: 'quiet-text', ...where });
    node.textContent = content;
    svg.append(node);
  };
  for (const value of ticks(low, high)) {
    svg.append(drawn('line', { x1: left, x2: width - 24, y1: y(value), y2: y(value), class: 'grid' }));
    text({ x: left - 6, y: y(value) + 4, 'text-anchor': 'end' }, String(value));
  }
  for (const value of ticks(0, to)) text({ x: x(value), y: height - bottom + 16, 'text-anchor': 'middle' }, value ? count(value) : '0');
  text({ x: (left + width - 24) / 2, y: height - 2, 'text-anchor': 'middle' }, 'samples');
  for (const one of curves) {
    const line = drawn('polyline', { class: 'run-curve', 'data-run': one.name, points: one.points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(' ') });
    line.style.stroke = one.ink;
    svg.append(line);
  }
  return svg;
}

// runs that are training

let following;
export async function follow(plan_with) {
  clearTimeout(following);
  if (by('runs').hidden) return;
  try {
    const found = await (await ask('/api/live')).json();
    const before = by('live-list').dataset.names ?? '', names = found.map((one) => one.name).join('\n');
    by('live').hidden = !found.length;
    by('live-list').dataset.names = names;
    by('live-list').replaceChildren(...found.map(live_run));
    if (before !== names) await show_runs(plan_with); // one has ended or begun
  } catch (error) {
    trouble(error.message);
  }
  following = setTimeout(() => follow(plan_with), 1500);
}

function live_run(run) {
  const last = run.points.at(-1);
  const box = make('div', { class: 'live-run', 'data-run': run.name }, make('div', { class: 'name' }, run.name));
  if (last === undefined) box.append(make('p', { class: 'note' }, 'starting: no steps were logged yet'));
  else {
    const evaluated = run.evaluation ? `last evaluation ${run.evaluation.ne.toFixed(4)} at step ${run.evaluation.step.toLocaleString('en')}` : '';
    box.append(figure('step', last.step.toLocaleString('en'), `${count(last.num_samples ?? 0)} samples`));
    box.append(figure('waiting for data', percent(last.waiting_share ?? 0), 'of the time'));
    for (const [key, what, show, more] of [['ne', 'NE', digits, evaluated], ['loss', 'loss', digits, ''], ['samples_per_s', 'samples/s', count, '']]) {
      const points = run.points.filter((point) => point[key] !== undefined);
      if (!points.length) continue;
      const part = figure(what, show(points.at(-1)[key]), more);
      part.querySelector('.value').after(sparkline(what, points.map((point) => [point.step, point[key]]), show));
      box.append(part);
    }
  }
  if (run.roles?.length) box.append(roles_of(run));
  return box;
}

function roles_of(run) {
  const heads = ['Role', 'samples/s', 'cores', 'memory'].map((text, i) => make('th', { scope: 'col', class: i ? 'number' : '' }, text));
  const rows = run.roles.map((role) => make('tr', { class: role.is_silent ? 'quietly' : '' }, make('th', { scope: 'row' }, role.name + (role.is_silent ? ' (silent)' : '')),
    ...[[role.samples_per_s, count], [role.cores, (x) => x.toFixed(1)], [role.rss_bytes, bytes]].map(([value, show]) => make('td', { class: 'number' }, value === undefined ? '' : show(value)))));
  return make('div', { class: 'wide roles', tabindex: 0, role: 'region', 'aria-label': `Roles of ${run.name}` }, make('table', { 'aria-label': `Roles of ${run.name}` }, make('thead', {}, make('tr', {}, ...heads)), make('tbody', {}, ...rows)));
}

function sparkline(what, points, show) {
  const values = points.map(([, y]) => y), low = Math.min(...values), high = Math.max(...values), width = 150, height = 36;
  const from = points[0][0], to = Math.max(points.at(-1)[0], from + 1);
  const x = (step) => 2 + ((width - 6) * (step - from)) / (to - from), y = (value) => height - 3 - ((height - 6) * (value - low)) / (high - low || 1);
  const svg = drawn('svg', { class: 'sparkline', viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `${what} from ${show(values[0])} to ${show(values.at(-1))}, between ${show(low)} and ${show(high)}` });
  svg.append(drawn('polyline', { points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(' ') }));
  svg.append(drawn('circle', { cx: x(points.at(-1)[0]), cy: y(values.at(-1)), r: 2.5 }));
  return svg;
}
