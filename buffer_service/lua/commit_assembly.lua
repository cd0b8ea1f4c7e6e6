-- step, fresh ids, reevaluated ids, (id, change of references) each with a frame key, tables, (prompt id, prompt),
-- prompt ids that left B_bad, batch, composition, its limit, number of stale fates -> 1, or 0 when the fence is broken
local step = count()

local function list()
  local values = {}
  for i = 1, count() do values[i] = arg() end
  return values
end

local fresh, reevaluated = list(), list()
if meta('assembled') ~= step - 1 then return 0 end
for _, id in ipairs(fresh) do
  if not call('ZSCORE', K.fresh, id) then return 0 end
end
for _, id in ipairs(reevaluated) do
  if not call('ZSCORE', K.reevaluated, id) then return 0 end
end

run_even_when_full()
for _, id in ipairs(fresh) do
  call('ZREM', K.fresh, id)
  call('HDEL', K.requests, id)
end
for _, id in ipairs(reevaluated) do call('ZREM', K.reevaluated, id) end
for _ = 1, count() do refer(arg(), count(), frame_key()) end
call('SET', K.tables, arg())
for _ = 1, count() do call('HSET', K.bad_prompts, arg(), arg()) end
for _, prompt_id in ipairs(list()) do call('HDEL', K.bad_prompts, prompt_id) end
call('HSET', K.batches, step, arg())
call('LPUSH', K.compositions, arg())
call('LTRIM', K.compositions, 0, count() - 1)
-- New stale fates are put before those that this assembly saw.
call('LTRIM', K.stale, 0, -1 - count())
call('HSET', K.meta, 'assembled', step)
return 1
