-- group id, worker, problem -> 1; 0 if it is already known, or the group is deleted
run_even_when_full()
local id, worker, problem = arg(), arg(), arg()
if call('HEXISTS', K.records, id) == 0 or call('HSETNX', K.bad_frames, id, problem) == 0 then return 0 end
call('HINCRBY', K.counters, 'bad_frames:' .. worker, 1)
call('HSET', K.meta, 'last_failure', 'bad_frame: ' .. problem .. ' in group ' .. id .. ' of ' .. worker)
return 1
