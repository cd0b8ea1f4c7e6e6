-- step, policy version: neither ever decreases
run_even_when_full()
call('HSET', K.meta, 'step', math.max(count(), meta('step')))
call('HSET', K.meta, 'policy_version', math.max(count(), meta('policy_version')))
return 1
