-- step, edits of the tables that it began with, fresh ids, reevaluated ids, (change of references, ids) each with their
-- frame keys when it is negative, tables, (prompt id, prompt), prompt ids that left B_bad, batch, composition, its
-- limit, number of stale results, bytes of the fresh groups, success counts (or '')
-- -> 1, or 0 when the fence is broken
local step, edits = count(), count()

local fresh, reevaluated = list(), list()
local function has_all(table, ids)
  for first = 1, #ids, CHUNK do
    for _, score in ipairs(call('ZMSCORE', table, unpack(ids, first, math.min(first + CHUNK - 1, #ids)))) do
      if not score then return false end
    end
  end
  return true
end

if meta('assembled') ~= step - 1 or meta('table_edits') ~= edits then return 0 end
if not (has_all(K.fresh, fresh) and has_all(K.reevaluated, reevaluated)) then return 0 end

run_even_when_full()
bulk('ZREM', K.fresh, fresh)
bulk('HDEL', K.requests, fresh)
bulk('ZREM', K.reevaluated, reevaluated)
for _ = 1, count() do
  local change, ids = count(), list()
  refer(ids, change, change < 0 and frame_keys(#ids))
end
call('SET', K.tables, arg())
for _ = 1, count() do call('HSET', K.bad_prompts, arg(), arg()) end
for _, prompt_id in ipairs(list()) do call('HDEL', K.bad_prompts, prompt_id) end
call('HSET', K.batches, step, arg())
call('LPUSH', K.compositions, arg())
call('LTRIM', K.compositions, 0, count() - 1)
-- New stale results come before those that this assembly has read.
call('LTRIM', K.stale, 0, -1 - count())
call('HINCRBY', K.meta, 'fresh_bytes', 0 - count())
local success_counts = arg()
if success_counts ~= '' then call('HSET', K.success_counts, step, success_counts) end
call('HSET', K.meta, 'assembled', step, 'table_edits', 0)
return 1
