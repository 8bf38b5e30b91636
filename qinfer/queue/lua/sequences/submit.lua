-- Appends a step to a sequence. START begins a life behind the executing one. A repeated numbered step gets the stored
-- response, or waits behind the first of its number.
-- KEYS: record. ARGV: prefix, is_fragile, name, flags (S, E, SE or ''), number (0 = none), hash of a START's content,
--   frame, request with the payload ('' = none), timeout (ms), limit of waiting steps and of open sequences (0 = none),
--   weight (0 = unknown), and of a START `<version> <generation> <kind> <idle ms>`.
-- Returns {new, life, number, entry id} | {stored, life, number} | {gap, next number} | {old, last number} | {ended,
--   code, text, step} | {unknown} | {full}.
local function one(KEYS, ARGV)
local record = KEYS[1]
begin(ARGV[1], ARGV[2])
local name, flags, number, hash, frame, payload = ARGV[3], ARGV[4], tonumber(ARGV[5]), unpack(ARGV, 6, 8)
local timeout, limit, most, weight, about = tonumber(ARGV[9]), tonumber(ARGV[10]), tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13]
local steps = steps_of(name)
local is_start, is_end = string.find(flags, 'S') ~= nil, string.find(flags, 'E') ~= nil
local of = load(name)
local is_open = of and of.state == 'open'

local function append(life, n)
  local fields = {'f', frame, 'l', life, 'n', n, 'd', string.format('%.0f', now + timeout)}
  if payload ~= '' then fields[9], fields[10] = 'p', payload end
  local entry = redis.call('XADD', steps, '*', unpack(fields))
  if is_end and of.last == 0 then of.last = n end
  keep(of, of.idle + timeout + DAY_MS)
  if of.state == 'open' and of.life == life and of.owner ~= '' then
    tell(of, entry, life, n, 1, frame, payload)
  end
  return {'new', life, n, entry}
end

local function is_repeated(n, committed)
  return n > 0 and n <= committed and has_answer(name, of.tail, n)
end

-- A tenant below its share is admitted even if others have filled the limit.
local function has_no_room()
  if most == 0 or redis.call('ZCARD', prefix .. 'sequences') < most then return false end
  local tenant, sum, tenants = tenant_of(name), 0, redis.call('HGETALL', prefix .. 'sequences~')
  for i = 1, #tenants, 2 do
    if tenants[i] ~= tenant then sum = sum + tonumber(tenants[i + 1]) end
  end
  local own = math.max(weight, 1)
  return tenant == '' or sum == 0 or redis.call('SCARD', prefix .. 'sequences~' .. tenant) * (sum + own) >= most * own
end

local is_full = limit > 0 and redis.call('XLEN', steps) >= limit

-- The content tells a repeated START from a new life.
local is_again = is_start and number == 1 and of and of.accepted == 1 and of.hash == hash
  and (is_open or is_repeated(1, of.committed))
if is_start and not is_again then
  if number > 1 then return {'gap', 1} end
  if is_full then return {'full'} end
  if not is_open then
    if has_no_room() then return {'full'} end
    local version, generation, kind, idle = string.match(about, '^(%S+) (%S+) (%S+) (%S+)$')
    local life, token, told = of and of.tail + 1 or 1, of and of.token or 0, of and of.number or 0
    of = fresh(name)
    for field, value in pairs({state = 'open', life = life, version = version, generation = generation, kind = kind,
      idle = tonumber(idle), token = token, number = told, weight = weight, era = era, tail = life, accepted = 1, hash = hash}) do of[field] = value end
    wait_for_owner(of, 'seq')
    return append(life, 1)
  end
  redis.call('HSETNX', record, 'last:' .. of.tail, of.last > 0 and of.last or of.accepted)
  local is_done = of.life == of.tail
    and (of.committed >= of.accepted or (of.kind == 'explicit' and not first_unanswered(of)))
  local life = of.tail + 1
  of.tail, of.accepted, of.hash, of.last = life, 1, hash, 0
  redis.call('HSET', record, 'next:' .. life, about)
  local answer = append(life, 1)
  if is_done then over(of, GRACE_MS) end
  return answer
end

if not of then return {'unknown'} end
local committed = of.life == of.tail and of.committed or 0
if is_repeated(number, committed) then return {'stored', of.tail, number} end
if not is_open then
  if of.failed_life == of.life then return {'ended', of.code, of.text, of.failed} end
  return {'unknown'}
end
if number > of.accepted + 1 then return {'gap', of.accepted + 1} end
if number > 0 and number <= committed then return {'old', committed} end
if is_full then return {'full'} end
if number > 0 and number <= of.accepted then return append(of.tail, number) end
if of.last > 0 then return {'unknown'} end
of.accepted = of.accepted + 1
return append(of.tail, of.accepted)
end
