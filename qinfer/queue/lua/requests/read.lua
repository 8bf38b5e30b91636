-- Reads a request's record; needs holder.lua.
-- Returns {values, has_result, holder ('' = no worker), deliveries, stored responses}; the first value is nil if it is gone.
local function read_request(prefix, group, id, fields)
  local record, holder, deliveries = prefix .. 'request:' .. id, '', 0
  local state, version, name, entry = unpack(redis.call('HMGET', record, 'state', 'version', 'lane', 'entry'))
  if state == 'queued' then
    local pending = redis.pcall('XPENDING', prefix .. version .. ':' .. name, group, entry, entry, 1)[1]
    if pending then
      holder, deliveries = is_ownerless(pending[2]) and '' or pending[2], pending[4]
    end
  end
  return {redis.call('HMGET', record, unpack(fields)), redis.call('EXISTS', prefix .. 'result:' .. id), holder, deliveries,
    redis.call('LLEN', prefix .. 'responses:' .. id)}
end
