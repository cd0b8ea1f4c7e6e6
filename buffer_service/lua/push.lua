-- n, n groups (id, terms, version, worker, rank, record); frame keys: (incoming, final) per group
-- -> {fate, ...} | {'mismatch', id, terms of the request} | {'missing', id}
local groups = {}
for i = 1, count() do
  groups[i] = {
    id = arg(), terms = arg(), version = tonumber(arg()), worker = arg(), rank = tonumber(arg()),
    record = arg(),
    incoming = frame_key(), frame = frame_key(),
  }
end

local function refuse_all(word, id, detail)
  for _, group in ipairs(groups) do call('UNLINK', group.incoming) end
  return {word, id, detail}
end

for _, group in ipairs(groups) do
  local request = find_open(group.id)
  if request and request.terms ~= group.terms then return refuse_all('mismatch', group.id, request.terms) end
  if call('EXISTS', group.incoming) == 0 then return refuse_all('missing', group.id, '') end
end

local TABLE = {fresh = 'fresh', reevaluate = 'reevaluated'}

local function store(group, request)
  call('RENAME', group.incoming, group.frame)
  call('PERSIST', group.frame)
  call('HSET', K.records, group.id, group.record)
  call('HSET', K.refs, group.id, 1)
  call('HINCRBY', K.meta, 'bytes', call('STRLEN', group.frame))
  call('HSET', K.meta, 'failures_in_a_row', 0)
  settle(request)
  local ready = TABLE[request.purpose]
  if ready then
    local place = group.rank * SPAN + call('HINCRBY', K.meta, 'seq', 1)
    call('ZADD', K[ready], string.format('%.0f', place), group.id)
  end
  -- The request of a fresh group is needed until its batch: its prompt may enter B_bad, or be asked again.
  if request.purpose ~= 'fresh' then call('HDEL', K.requests, group.id) end
  return 'stored'
end

local function admit(group)
  local request = find_open(group.id)
  if not request then return call('ZSCORE', K.done, group.id) and 'duplicate' or 'unknown' end
  if group.version < request.min_version then
    requeue(request)
    return 'stale'
  end
  return store(group, request)
end

run_even_when_full()
local fates = {}
for i, group in ipairs(groups) do
  fates[i] = admit(group)
  if fates[i] ~= 'stored' then call('UNLINK', group.incoming) end
  call('HINCRBY', K.counters, 'pushed_groups:' .. fates[i], 1)
  call('HSET', K.workers, group.worker, now_ms())
end
return fates
