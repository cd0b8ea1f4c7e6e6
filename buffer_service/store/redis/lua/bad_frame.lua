-- group id, worker, what is wrong -> 1; 0 when it is known already, or the group is gone
run_even_when_full()
local id, worker, problem = arg(), arg(), arg()
if call('HEXISTS', K.records, id) == 0 or call('HSETNX', K.bad_frames, id, problem) == 0 then return 0 end
call('HINCRBY', K.counters, 'bad_frames:' .. worker, 1)
call('HSET', K.meta, 'last_failure', 'bad_frame: ' .. problem .. ' in group ' .. id .. ' of ' .. worker)
return 1
