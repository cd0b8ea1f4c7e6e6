-- step and edits of the tables that were read, tables, n, n group ids that left B_high with their frame keys, n, n
-- prompt ids that left B_bad -> 1, or 0 when those tables are not the newest
if meta('assembled') ~= count() or meta('table_edits') ~= count() then return 0 end
run_even_when_full()
call('SET', K.tables, arg())
call('HINCRBY', K.meta, 'table_edits', 1)
local gone = list()
refer(gone, -1, frame_keys(#gone))
for _ = 1, count() do call('HDEL', K.bad_prompts, arg()) end
return 1
