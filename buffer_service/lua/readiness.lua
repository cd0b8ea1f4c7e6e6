-- step -> {assembled, fresh groups, requests left of the step's round ('' when not issued), failures, last failure,
--           open fresh requests planned for steps up to this one, bytes of the fresh groups}
local step = arg()
return {
  meta('assembled'),
  call('ZCARD', K.fresh),
  call('HGET', K.rounds, step) or '',
  meta('failures_in_a_row'),
  call('HGET', K.meta, 'last_failure') or '',
  call('ZCOUNT', K.planned, '-inf', step),
  meta('fresh_bytes'),
}
