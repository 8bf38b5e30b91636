-- Ends a life by an error at one of its steps, or, without a code, because its idle time is over.
-- KEYS: record. ARGV: prefix, is_fragile, name, token ('' = any caller, 0 = only without an owner), life, step, code
--   ('' = idle, or another life waits behind it), text, last entry of the owner's lane that was told.
-- An owner is told of a cancelled step, because it knows the executing steps; `fail:<life>` ends the life if the owner
-- dies first.
-- Returns {whether it ended, or will when it begins, unreferenced objects}.
begin(ARGV[1], ARGV[2])
make_room()
local name, token, life, n, code, text = ARGV[3], ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[7], ARGV[8]
local of = load(name)
if not of or of.state ~= 'open' then return {0, {}} end
if token == '0' then
  if of.owner ~= '' and of.life == life then return {0, {}} end
elseif token ~= '' and (of.owner == '' or of.token ~= tonumber(token)) then
  return {0, {}}
end

if code == '' then
  if of.life ~= life or not is_direct(of) then return {0, {}} end
  if of.tail > life then return {1, over(of, GRACE_MS)} end
  local from = ARGV[9] == '' and '-' or '(' .. ARGV[9] -- a step that the owner has not read goes on
  if #redis.call('XRANGE', lane_of(of.version, of.owner), from, '+', 'COUNT', 1) > 0 then return {0, {}} end
  if redis.call('XLEN', steps_of(name)) > 0 then return {0, {}} end
  local gone = over(of, GRACE_MS)
  redis.call('ZREM', prefix .. 'sequence-endings', name)
  forget(of)
  return {1, gone}
end
if life > of.life and life <= of.tail then
  redis.call('HSETNX', KEYS[1], 'fail:' .. life, n .. ' ' .. code .. ' ' .. text)
  return {1, {}}
end
if of.life ~= life or n <= of.committed then return {0, {}} end
if token == '' and code == 'cancelled' and of.owner ~= '' then
  local doomed = doom_of(of)
  if not doomed or n < doomed then redis.call('HSET', KEYS[1], 'fail:' .. life, n .. ' ' .. code .. ' ' .. text) end
  tell_cancel(of, life, n)
  return {0, {}}
end
return {1, fail(of, code, text, n)}
