-- Moves an entry that `consumer` still owns to the dead letters, with its payload, and trims these.
-- KEYS: lane, letters, payload (optional). ARGV: group, consumer, id, version and name of the lane, request id, code,
--   reason, age (ms), most (bytes), name of the payload object's copy or '', frame to keep instead of the entry's or '', tenant.
-- Returns {letter, unreferenced objects}, or nil.
local lane, letters, payload = KEYS[1], KEYS[2], KEYS[3]
local group, consumer, id, age, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[8]), tonumber(ARGV[9])

local pending = held(lane, group, consumer, id)
if not pending then return false end
local entry = redis.call('XRANGE', lane, id, id)[1]
if not entry then
  redis.call('XACK', lane, group, id) -- its body is gone
  return false
end

local copy = ARGV[10] ~= '' and ARGV[10]
local frame = ARGV[11] ~= '' and ARGV[11] or entry[2][2]
local is_object = payload and redis.call('TYPE', payload).ok == 'hash'
local tensors = payload and not is_object and redis.call('GET', payload) or ''
local fields, size, gone = {}, #frame + #tensors, {}
if is_object then
  local known = redis.call('HMGET', payload, 'v', 'name', 'size')
  fields = {'v', known[1], 'object', copy or known[2], 'object_size', known[3]}
  size = size + tonumber(known[3])
  if copy then gone[1] = known[2] end
end
redis.call('XACK', lane, group, '0-0') -- for full memory
local letter = redis.call('XADD', letters, '*', 'lane', ARGV[4], 'request_id', ARGV[5], 'code', ARGV[6], 'reason', ARGV[7],
  'deliveries', pending[4], 'size', size, 'frame', frame, 'payload', tensors, 'tenant', ARGV[12], unpack(fields))
redis.call('XACK', lane, group, id)
redis.call('XDEL', lane, id)
ended(lane, id)
if payload then redis.call('UNLINK', payload) end

trim_letters(letters, letter, #frame + #tensors, age, most)
return {letter, gone}
