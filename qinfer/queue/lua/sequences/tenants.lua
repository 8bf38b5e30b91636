-- Tenants whose sequences wait for an owner; needs record.lua (`wait_for_owner`).

local function stream_of(lane, tenant) return tenant == '' and lane or lane .. '~' .. tenant end

local function blank_of(lane)
  local first = redis.call('XRANGE', lane, '-', '+', 'COUNT', 1)[1]
  return first and first[2][2] == '' and first[1] or nil
end

local function look(share, lanes)
  for _, lane in ipairs(lanes) do
    local stream = stream_of(lane, share.tenant)
    local tickets = redis.call('XRANGE', stream, '-', '+', 'COUNT', 2)
    local first = tickets[1] and tickets[1][2][2] == '' and tickets[2] or tickets[1]
    if first and first[2][2] ~= '' then
      share.stream, share.id, share.name, share.since = stream, first[1], first[2][2], tonumber(string.match(first[1], '^%d+'))
      return true
    end
  end
  return false
end

-- Returns tenants with open sequences: {tenant, weight, held (by all workers), and for waiting ones since (ms), …}. The
--   first entry is for callers without a key or of earlier versions.
local function shares_of(lanes)
  local shares = {{tenant = '', weight = 1, held = redis.call('ZCARD', prefix .. 'sequences')}}
  local tenants = redis.call('HGETALL', prefix .. 'sequences~')
  for i = 1, #tenants, 2 do
    local held = redis.call('SCARD', prefix .. 'sequences~' .. tenants[i])
    shares[#shares + 1] = {tenant = tenants[i], weight = math.max(tonumber(tenants[i + 1]) or 1, 1), held = held}
    shares[1].held = math.max(shares[1].held - held, 0)
  end
  for _, share in ipairs(shares) do
    if look(share, lanes) then
      for _, lane in ipairs(lanes) do
        local blank = share.tenant == '' and blank_of(lane) and 1 or 0
        share.held = share.held - redis.call('XLEN', stream_of(lane, share.tenant)) + blank
      end
    end
  end
  return shares
end

-- The fewest held by weight, then the longest waiting.
local function next_of(shares)
  local best
  for _, share in ipairs(shares) do
    local more = best and share.held / share.weight - best.held / best.weight
    if share.since and (not best or more < 0 or (more == 0 and share.since < best.since)) then best = share end
  end
  return best
end

-- Keeps blank tickets only in lanes in which tenants' sequences wait.
local function wake(shares, lanes)
  for _, lane in ipairs(lanes) do
    local is_any, blank = false, blank_of(lane)
    for _, share in ipairs(shares) do
      is_any = is_any or (share.since and share.tenant ~= '' and redis.call('XLEN', stream_of(lane, share.tenant)) > 0)
    end
    if blank and not is_any then redis.call('XDEL', lane, blank) end
    if is_any and redis.call('XLEN', lane) == 0 then redis.call('XADD', lane, '*', 's', '') end
  end
end
